"""Hostile files: forged checkpoints, Hugging Face folders and chat templates."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.adversary.bench import Bench, Place, Trial, Verdict
from tests.adversary.failing_disk import inputs
from tests.adversary.mutations import mutations, several, write_manifest
from tests.adversary.run_folders import copy_run, judge_input, stopped

MANIFESTS, FOLDERS, TEMPLATES = 70, 50, 30
_STEP = Path("checkpoints") / "step-00000004"


def _limit(every: bool, count: float) -> int | None:
    return None if every else max(1, round(count))


def _some(found: list[Any], every: bool, count: float) -> list[Any]:
    return found if every else found[: max(1, round(count))]


# ---- manifests ----


def manifests(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    document = json.loads((stopped(bench) / _STEP / "manifest.json").read_text())
    # Nine in ten leaves are numbers of tensors, so that the others are drawn separately.
    rest = [(key,) for key in document if key not in ("tensors", "sha256")]
    changed = [
        *mutations(document, rng, under=[("tensors",)], limit=_limit(every, MANIFESTS * scale * 0.25)),
        *mutations(document, rng, under=rest, limit=_limit(every, MANIFESTS * scale * 0.6)),
        *several(document, rng, 3, round(MANIFESTS * scale * 0.15)),
    ]
    rng.shuffle(changed)
    # Half of them by a resume, which reads the whole manifest; the other commands read parts of it.
    readers = ("resume", "generate", "resume", "inspect", "resume", "export")
    return [
        Trial(f"{readers[n % 6]}: {label}", _read_manifest(readers[n % 6], mutated))
        for n, (label, mutated) in enumerate(changed)
    ]


def _read_manifest(reader: str, document: Any) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        """A signed forgery is trusted, so that another state is no defect; exceeding a limit is."""
        copy_run(place)
        write_manifest(place.run / _STEP, document)
        step = str(place.run / _STEP)
        if reader == "resume":
            return judge_input(place.train("sync"))
        words = {
            "generate": ["generate", step, "--tokens", "1,2,3", "--max-new-tokens", "2", "--threads", "1"],
            "inspect": ["checkpoint", "inspect", step],
            "export": ["export", step, str(place.disk / "out")],
        }
        return judge_input(place.command(*words[reader]))

    return run


# ---- Hugging Face folders ----


def hugging_face(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    folder = inputs(bench).hugging_face
    config = json.loads((folder / "config.json").read_text())
    header, payload = _tensors(folder / "model.safetensors")
    # Keys that a config.json may have, whether or not this one does.
    grown = {**dict.fromkeys(_KEYS), **config}
    found = [
        *[
            (f"config.json {label}", _config(mutated))
            for label, mutated in mutations(grown, rng, limit=_limit(every, FOLDERS * scale * 0.5))
        ],
        *[
            (f"model.safetensors {label}", _header(mutated, payload))
            for label, mutated in mutations(header, rng, limit=_limit(every, FOLDERS * scale * 0.3))
        ],
        *_some(rng.sample(list(_RAW.items()), len(_RAW)), every, FOLDERS * scale * 0.2),
    ]
    readers = ("import", "import", "generate")
    return [
        Trial(f"{readers[n % 3]}: {label}", _read_folder(readers[n % 3], change))
        for n, (label, change) in enumerate(found)
    ]


_KEYS = (
    "head_dim",
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "quantization_config",
    "rope_parameters",
    "pad_token_id",
)


def _tensors(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _config(document: Any) -> Callable[[Path], None]:
    # Keys that the original lacks are null, except in their own mutations.
    return lambda folder: (folder / "config.json").write_text(json.dumps(document)) and None


def _header(document: Any, payload: bytes) -> Callable[[Path], None]:
    text = json.dumps(document).encode()
    return lambda folder: (
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + payload) and None
    )


def _raw(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return rewrite


_RAW: dict[str, Callable[[Path], None]] = {
    "a header of 2^60 bytes": _raw(lambda data: struct.pack("<Q", 1 << 60) + data[8:]),
    "a header of 0 bytes": _raw(lambda data: struct.pack("<Q", 0) + data[8:]),
    "a header that is cut": _raw(lambda data: data[:20]),
    "an empty file": _raw(lambda data: b""),
    "a header with a key twice": _raw(lambda data: data.replace(b'{"', b'{"__metadata__": {}, "__metadata__": {}, "', 1)),
    "a header of brackets": _raw(lambda data: struct.pack("<Q", 100_000) + b"[" * 100_000),
    "config.json of brackets": _raw(lambda data: b"[" * 100_000, "config.json"),
    "config.json a list": _raw(lambda data: b"[]", "config.json"),
    "config.json null": _raw(lambda data: b"null", "config.json"),
    "config.json with digits without end": _raw(lambda data: data.replace(b"{", b'{"x": ' + b"9" * 100_000 + b", ", 1), "config.json"),
    "config.json that is no UTF-8": _raw(lambda data: data.replace(b'"', b'"\xff', 1), "config.json"),
    "config.json with code to load": _raw(
        lambda data: data.replace(b"{", b'{"auto_map": {"AutoModelForCausalLM": "evil.Model"}, ', 1), "config.json"
    ),
    "config.json a symlink to /dev/zero": lambda folder: (folder / "config.json").unlink() or (folder / "config.json").symlink_to("/dev/zero"),
}  # fmt: skip


def _read_folder(reader: str, change: Callable[[Path], None]) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        model = place.folder / "model"
        shutil.copytree(inputs(place.bench).hugging_face, model)
        change(model)
        words = {
            "import": ["import", str(model), str(place.disk / "out")],
            "generate": [
                "generate",
                str(model),
                "--tokens",
                "1,2,3",
                "--max-new-tokens",
                "2",
                "--threads",
                "1",
            ],
        }
        verdict = judge_input(place.command(*words[reader]))
        if left := place.leftovers():
            verdict.blame("files left behind", ", ".join(left[:4]))
        return verdict

    return run


# ---- chat templates ----

_REST = "{% for m in messages %}{{ m.content }}{% endfor %}"
# Templates by what they do. N is replaced by a random size.
HOSTILE_TEMPLATES = {
    "doubles with ~": "{% set n = namespace(s='a') %}{% for i in range(N) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubles with +": "{% set n = namespace(s='a') %}{% for i in range(N) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s|length }}",
    "doubles a list": "{% set n = namespace(s=[1]) %}{% for i in range(N) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "multiplies a text": "{{ 'a' * (10 ** N) }}",
    "multiplies a list": "{{ ([0] * (10 ** N))|length }}",
    "takes a power of a power": "{{ (9 ** (9 ** N)) % 7 }}",
    "multiplies numbers": "{% set n = namespace(x=3) %}{% for i in range(N) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x % 7 }}",
    "replaces": "{{ ('a' * 99999).replace('a', 'b' * 99999)|length }}",
    "joins": "{{ range(99999)|join('x' * 99999) }}",
    "pads with %": "{{ '%0Nd' % 1 }}",
    "pads with %, many digits": "{{ '%0999999999d' % 1 }}",
    "pads with format": "{{ '{:>9999999999}'.format(1) }}",
    "pads with ljust": "{{ 'a'.ljust(9999999999)|length }}",
    "pads with center": "{{ 'a'|center(9999999999) }}",
    "pads with indent": "{{ ('a\n' * 9999)|indent(999999) }}",
    "pads with tojson": "{{ messages|tojson(indent=999999999) }}",
    "slices": "{{ range(9999)|slice(99999999)|list|length }}",
    "batches": "{{ range(9)|batch(999999999, 'x')|list|length }}",
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "loops over a text": "{% for a in 'a' * 9999 %}{% for b in 'a' * 9999 %}{% for c in 'a' * 9999 %}{% endfor %}{% endfor %}{% endfor %}",
    "calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(N) }}",
    "calls itself for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nests parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nests lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "nests if": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "nests for": "".join("{% for i in range(2) %}" for _ in range(18)) + "x" + "{% endfor %}" * 18,
    "reaches for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reaches for globals": "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "reaches through format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "reaches through attr": "{{ messages|attr('__class__')|attr('__base__') }}",
    "includes a file": "{% include '/etc/passwd' %}",
    "imports a template": "{% import 'os' as os %}{{ os.system('touch escaped') }}",
    "raises": "{{ raise_exception('no') }}",
    "divides by zero": "{{ 1 / 0 }}",
    "names what is not there": "{{ nothing.at.all }}",
    "is cut": "{% for m in messages",
    "is not text": "\x00\x01{{",
    "sorts what cannot be sorted": "{{ [1, 'a', none]|sort }}",
    "changes the messages": "{% for m in messages %}{% set _ = m.update({'content': 1}) %}{% endfor %}",
    "appends while looping": "{% set l = [1] %}{% for i in l %}{% set _ = l.append(1) %}{% endfor %}",
    "filters in a chain": "{{ 'a'" + "|upper" * 20_000 + " }}",
    "concatenates in a chain": "{{ " + " ~ ".join(["'a'"] * 20_000) + " }}",
}  # fmt: skip


def templates(bench: Bench, rng: random.Random, every: bool, scale: float = 1.0) -> list[Trial]:
    found = [
        (f"{name}, N = {size}", text.replace("N", str(size)))
        for name, text in HOSTILE_TEMPLATES.items()
        for size in (rng.sample(range(25, 90), 2) if "N" in text else [0])
    ]
    # Pairs too, since limits on each part do not limit the whole.
    for _ in range(len(found) // 4):
        (first, one), (second, two) = rng.sample(found, 2)
        found.append((f"{first} and {second}", one + two))
    rng.shuffle(found)
    return [Trial(label, _render(text + _REST)) for label, text in _some(found, every, TEMPLATES * scale)]


_CHAT = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}


def _render(text: str) -> Callable[[Place], Verdict]:
    def run(place: Place) -> Verdict:
        (place.folder / "chat.jsonl").write_text(f"{json.dumps(_CHAT)}\n" * 3)
        (place.folder / "template.jinja").write_text(text)
        words = (
            f"data show --sft --data-path {place.folder / 'chat.jsonl'} --tokenizer-type ByteTokenizer --seq-length 64 --index 0 "
            f"--chat-template {place.folder / 'template.jinja'} --run-dir {place.run}"
        )
        verdict = judge_input(place.command(*words.split()))
        if (place.disk / "escaped").exists():
            verdict.blame("silent acceptance", "the template ran a program")
        return verdict

    return run
