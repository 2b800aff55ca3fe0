"""The scripts beside this file that make models, imported by their names."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_maker(name: str) -> ModuleType:
    """Import ``NAME.py`` of this folder. It is a script: it stays importable without the tests."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
