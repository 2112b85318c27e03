"""The package's version. A leaf module, so that workers can report it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
