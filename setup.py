"""Builds libtaskd.so into the package; everything else is in pyproject.toml.

It is no extension module: no Python in it, no suffix in its name, and one wheel for every version of Python. Where
there is no C compiler, the build says so and goes on; the package works without.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY = "taskd.python.cython_api.libs.libtaskd"


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # the source says what is exported

    def copy_extensions_to_source(self) -> None:
        """For an editable install."""
        Path("src", *LIBRARY.split(".")).parent.mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            self.warn(f"libtaskd.so was not built, the package works without it: {error}")


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        built = Path(self.bdist_dir, *LIBRARY.split(".")).with_suffix(".so")
        return "py3", "none", platform if built.exists() else "any"


setup(
    ext_modules=[
        Extension(
            LIBRARY,
            sources=["src/evertrain/taskd/native/libtaskd.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-fPIC"],
            # nodelete: a signal handler must not be unloaded.
            extra_link_args=["-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack", "-s"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
