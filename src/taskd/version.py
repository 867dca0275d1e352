"""TaskD has the version of the package that it is a part of."""

from evertrain import __version__ as __version__
