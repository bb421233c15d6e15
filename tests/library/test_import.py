"""The core imports only torch and the standard library."""

import json
import subprocess
import sys

CODE = """
import json, sys, torch
before = set(sys.modules)
import mooring
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([sorted(new - sys.stdlib_module_names), "torch._dynamo" in sys.modules, mooring.__all__]))
"""


def test_core_imports_only_torch_and_not_its_compiler():
    printed = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout
    new, compiler, public = json.loads(printed)
    assert new == ["mooring"]
    assert not compiler
    assert len(public) <= 12
