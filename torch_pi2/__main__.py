"""``python -m torch_pi2`` is the ``torch-pi2`` command."""

from torch_pi2.cli import command

command()
