"""`python -m bundle`."""

from bundle import train

print(__name__, __package__, __file__.rpartition("/")[2], train.__name__)
