"""Models behind a network interface: many requests decoded together, answered as OpenAI's API does."""
