"""The trainer runs on a CPU and leaves weights that load."""

import json
import subprocess
import sys
from pathlib import Path

from graphrt.demo.model import load_model

TRAINER = Path(__file__).parents[2] / "tools" / "train_demo.py"


def test_a_step_of_training_leaves_weights_and_their_record(tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    for index in range(60):
        (library / f"module{index}.py").write_text(f"value = {index}\n" * 20)
    sizes = ["--steps", "1", "--batch", "2", "--length", "32", "--device", "cpu"]
    command = [sys.executable, TRAINER, *sizes, "--stdlib", library, "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    load_model(path=tmp_path / "weights.safetensors")
    record = json.loads((tmp_path / "weights.json").read_text())
    assert record["training"]["steps"] == 1 and str(tmp_path) not in json.dumps(record)
    assert 6 < record["loss"]["validation bits per byte"] < 11
