"""``python -m torch_pi2.hf ARGUMENTS``: ``transformers ARGUMENTS``, with support for our folders."""

from transformers.cli.transformers import app

if __name__ == "__main__":  # torch_pi2.hf is imported by now
    app()
