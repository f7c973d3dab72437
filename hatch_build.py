"""Builds the C extension of perco's LMDB store, if there is a compiler; without it, the store is slower."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "perco.storage._native"


class Extension(BuildHookInterface[Any]):
    """Makes wheels that are for one platform and one version of Python. PERCO_NATIVE=0 leaves the extension out."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("PERCO_NATIVE", "1") == "0":
            return
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext
        from setuptools.errors import BaseError, CCompilerError

        root = Path(self.root)
        folder = root / "perco" / "storage" / "native"
        sources = sorted(str(path.relative_to(root)) for path in folder.glob("*.c"))
        extension = Extension(NAME, sources, depends=[str(folder / "native.h")], extra_compile_args=["-O2"])
        command = build_ext(Distribution({"name": "perco", "ext_modules": [extension]}))
        command.inplace, command.build_temp = True, str(root / "build" / "native")
        before = os.getcwd()
        os.chdir(root)
        try:
            command.finalize_options()
            command.run()
        except (BaseError, CCompilerError, OSError) as error:
            self.app.display_warning(f"perco's C extension was not built, so its LMDB store is slower: {error}")
            return
        finally:
            os.chdir(before)
        build_data["infer_tag"], build_data["pure_python"] = True, False
        built = Path(command.get_ext_filename(NAME))
        build_data["artifacts"].append(f"/{built.as_posix()}")
        self.app.display_info(f"built {built} with Python {sys.version.split()[0]}")
