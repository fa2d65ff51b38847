"""An HTTP server with OpenAI's API and continuous batching."""
