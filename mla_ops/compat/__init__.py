"""Drop-ins for packages that mla_ops replaces."""
