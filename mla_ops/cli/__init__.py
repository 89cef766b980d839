"""The subcommands of ``python -m mla_ops``, one file each: ``configure(parser)`` and ``run``."""
