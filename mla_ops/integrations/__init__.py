"""Bridges to other libraries; each is imported by name, and none by ``import mla_ops``."""
