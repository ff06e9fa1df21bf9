from .net import build  # noqa: F401
