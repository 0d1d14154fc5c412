"""Makes `train` importable without the repository's root on sys.path, where `kernels/` would shadow a package."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "train"

spec = importlib.util.spec_from_file_location("train", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules["train"] = module
spec.loader.exec_module(module)
