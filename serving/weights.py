"""Are the weights there, whole, and what the configuration says? Asked before a start, by heads of files alone.

A start that fails for its files fails late: after minutes of loading, in a message of another program. What is found
here is data, one finding for each kind of trouble, with what to do about it. Nothing but the heads of files is read, so
that a folder of hundreds of gigabytes is checked in well under a second; the data itself may still be damaged.

Formats: "Format" in the README of the safetensors repository and the checks of its `tensor.rs` (a head of at most 100
MB, tensors without gaps, nothing behind the last one); the index files that transformers writes beside split weights;
GGUF by `serving.model.gguf`.
"""

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from serving.errors import ConfigError
from serving.model.config import read_object
from serving.model.gguf import part_names, read_gguf
from serving.model.quantization import Quantization, Scheme, read_quantization

__all__ = ["Level", "WeightFinding", "WeightsCheck", "check_weights"]

_MAX_HEAD_BYTES = 100_000_000
_MAX_INDEX_BYTES = 2**28
_SHOWN = 4
_NOTABLE_RATIO = 0.02
"""Bytes of weights that are stored otherwise than the configuration says, above which it is worth a word: a few small
modules are left unquantised by every tool without being listed."""

_DTYPE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("F4",), 4),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
        **dict.fromkeys(("I32", "U32", "F32"), 32),
        **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    }
)
_PLAIN_DTYPES: Final[Mapping[str, str]] = MappingProxyType({"bfloat16": "BF16", "float16": "F16", "float32": "F32"})
_QUANTISED = frozenset(
    {"F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "I32"}
)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
)
_INDEX = "model.safetensors.index.json"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.DOTALL)
_LEFTOVERS = (".incomplete", ".part", ".crdownload", ".aria2", ".tmp")
_POINTER = b"version https://git-lfs.github.com/spec/"


class Level(StrEnum):
    """How bad a finding is: nothing to fear, something else than meant may be loaded, or nothing can be."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class WeightFinding:
    """One finding.

    Attributes:
        level: how bad it is.
        what: what was found, with names and numbers.
        where: the file or the folder.
        next_step: what to do about it; empty where there is nothing to do.
    """

    level: Level
    what: str
    where: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """What was found of the weights of one model.

    Attributes:
        source: the folder or the file that was asked about.
        format: safetensors, gguf, pytorch, or none where there are no weights.
        files: files of weights that an engine would load and that were read.
        tensors: tensors in them.
        bytes_by_dtype: bytes of tensor data by type, most first; empty where it cannot be told.
        quantisation: what the configuration (or the GGUF file) calls it; None where it does not say or is not known.
        findings: errors first.
    """

    source: Path
    format: str
    files: int
    tensors: int
    bytes_by_dtype: Mapping[str, int]
    quantisation: str | None
    findings: tuple[WeightFinding, ...]

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all tensors that were found; None where that cannot be told."""
        return sum(self.bytes_by_dtype.values()) or None

    @property
    def is_whole(self) -> bool:
        """Whether nothing was found that keeps an engine from loading them."""
        return all(finding.level is not Level.ERROR for finding in self.findings)


def check_weights(source: Path) -> WeightsCheck:
    """Check the weights of a model before a start.

    Args:
        source: the model's folder, or one GGUF file in it.

    Raises:
        ConfigError: there is no such folder or file, or it cannot be read.
    """
    try:
        is_file = source.is_file()
        if not (is_file and source.suffix == ".gguf") and not source.is_dir():
            raise ConfigError(f"{source}: is neither a folder with config.json and weights nor a GGUF file; name one")
        search = _Search(source, source.parent if is_file else source)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{source}: cannot be read: {reason or error}") from error
    names = sorted(search.names)
    if is_file:
        return _check_gguf(search, [name for name in part_names(source) if name in names])
    tensors = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_")]
    packed = [name for name in names if name.endswith(".gguf")]
    pickles = [name for name in names if re.fullmatch(r"(pytorch_model|model|consolidated).*\.(bin|pt|pth)", name)]
    if tensors:
        return _check_safetensors(search, tensors, others=packed + pickles)
    if packed:
        return _check_gguf(search, packed)
    if pickles:
        return _check_pickles(search, pickles)
    search.leftovers()
    step = "fetch the model into this folder"
    search.add(Level.ERROR, "there are no weights: no .safetensors, .gguf or .bin file", "", step)
    return search.result("none")


def _list(folder: Path) -> dict[str, os.stat_result | None]:
    """Files of a folder with what is known of them; None for a link to nothing."""
    found: dict[str, os.stat_result | None] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_file():
                    found[entry.name] = entry.stat()
                elif entry.is_symlink() and not entry.is_dir():
                    found[entry.name] = None
            except OSError:
                found[entry.name] = None
    return found


class _Tensor(NamedTuple):
    """One tensor; a tuple, since there may be a hundred thousand."""

    dtype: str
    dimensions: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a file is of no use: `reason` is the same for all files of its kind, `detail` is not."""

    reason: str
    next_step: str
    detail: str = ""


class _Search:
    """A check under way: the folder, and what was found so far."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source = source
        self.folder = folder
        self.names = _list(folder)
        self.findings: list[WeightFinding] = []

    def add(self, level: Level, what: str, name: str, next_step: str = "") -> None:
        where = str(self.folder / name).encode(errors="replace").decode()
        self.findings.append(WeightFinding(level, what.encode(errors="replace").decode(), where, next_step))

    def result(
        self,
        kind: str,
        *,
        files: int = 0,
        tensors: int = 0,
        bytes_by_dtype: Mapping[str, int] = MappingProxyType({}),
        quantisation: str | None = None,
    ) -> WeightsCheck:
        order = (Level.ERROR, Level.WARNING, Level.OK)
        findings = tuple(sorted(self.findings, key=lambda finding: order.index(finding.level)))
        return WeightsCheck(self.source, kind, files, tensors, bytes_by_dtype, quantisation, findings)

    def leftovers(self) -> None:
        """Files of a download that did not end; some tools keep them apart from the model."""
        found = [name for name in self.names if name.endswith(_LEFTOVERS)]
        places = [self.folder / ".cache" / "huggingface" / "download"]
        if self.folder.resolve().parent.name == "snapshots":
            places.append(self.folder.resolve().parent.parent / "blobs")
        for place in places:
            try:
                found += [f"{place.name}/{name}" for name in _list(place) if name.endswith(_LEFTOVERS)]
            except OSError:
                continue
        if found:
            what = f"a download is under way or did not end: {_shown(found)}"
            self.add(Level.WARNING, what, "", "let it end, or run it again; then remove these files")

    def tokenizer(self) -> None:
        """Whether text can be turned into tokens."""
        there = [name for name in self.names if name in _TOKENIZERS or name.endswith(".tiktoken")]
        if not there:
            self.add(
                Level.ERROR,
                "there is no tokenizer (tokenizer.json, tokenizer.model, tekken.json, vocab.json or .tiktoken)",
                "",
                "fetch it too, or give the engine one with --tokenizer (vLLM) or --tokenizer-path (SGLang)",
            )
            return
        troubles = {name: trouble for name in there if (trouble := self.no_content(name))}
        self.unusable(troubles, len(there))
        if not troubles:
            self.add(Level.OK, f"tokenizer: {_shown(there)}", "")

    def no_content(self, name: str) -> _Trouble | None:
        """Why there is nothing in a file that could be read; None if there is something."""
        stat = self.names.get(name)
        if stat is None:
            return _Trouble("is a link to nothing", "fetch the model again: the file that it points to is gone")
        if stat.st_size == 0:
            return _Trouble("is empty", "fetch it again")
        if stat.st_size < 1024:
            try:
                with (self.folder / name).open("rb") as file:
                    head = file.read(len(_POINTER))
            except OSError as error:
                return _Trouble("cannot be read", "look at its permissions", error.strerror or str(error))
            if head == _POINTER:
                step = "run `git lfs pull` in this folder, or fetch it anew"
                return _Trouble("is a Git LFS pointer and not the file", step)
        return None

    def unusable(self, troubles: Mapping[str, _Trouble], count: int) -> None:
        """Tell of files that are of no use, once for each reason."""
        by_reason: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        for name, trouble in troubles.items():
            by_reason[trouble.reason, trouble.next_step][name] = trouble.detail
        for (reason, step), details in by_reason.items():
            (first, detail), *others = sorted(details.items())
            why = f" ({detail})" if detail else ""
            if others:
                what = f"each of {len(details)} of {count} files {reason}: {_shown(details)}"
                self.add(Level.ERROR, f"{what}; {first}: {detail}" if detail else what, "", step)
            else:
                self.add(Level.ERROR, f"{first} {reason}{why}", first, step)


def _shown(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(name[:80] for name in ordered[:_SHOWN]) + more


def _size(count: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


# --- safetensors ---------------------------------------------------------------------------------------------------


def _check_safetensors(search: _Search, names: list[str], others: list[str]) -> WeightsCheck:
    search.leftovers()
    if others:
        search.add(
            Level.WARNING,
            f"there are weights in other formats beside the safetensors files: {_shown(others)}",
            "",
            "engines take the safetensors files; remove the others, or keep them in a folder of their own",
        )
    index = _index(search)
    loaded = _without_index(search, names) if index is None else _with_index(search, names, index)
    tensors: dict[str, _Tensor] = {}
    troubles: dict[str, _Trouble] = {}
    lost: dict[str, str] = {}
    twice: dict[str, str] = {}
    for name in loaded:
        found = search.no_content(name) or _head(search.folder / name)
        if isinstance(found, _Trouble):
            troubles[name] = found
            continue
        if index is not None:
            lost |= {tensor: name for tensor in index.places.get(name, ()) if tensor not in found}
        twice |= {tensor: name for tensor in found if tensor in tensors}
        tensors.update(found)
    search.unusable(troubles, len(loaded))
    if lost:
        what = f"{len(lost)} tensors are not in the files where the index places them: {_shown(lost)}"
        search.add(Level.ERROR, what, _INDEX, "files and index are of two versions of the model; fetch both again")
    if twice:
        what = f"{len(twice)} tensors are in more than one file: {_shown(twice)}"
        search.add(Level.ERROR, what, "", "two sets of weights lie side by side; keep one")
    by_dtype = _bytes_by_dtype(tensors.values())
    total = sum(by_dtype.values())
    whole = not troubles and not (index and index.missing)
    if whole:
        what = f"{len(loaded)} files hold {len(tensors)} tensors of {_size(total)}, each file as long as it says"
        search.add(Level.OK, what, "")
        if index is not None and index.total_bytes not in (None, total):
            what = f"the tensors take {total} bytes, not {index.total_bytes} as the index says"
            step = "nothing if the files are right; tools that quantise often leave the number of what they began with"
            search.add(Level.WARNING, what, _INDEX, step)
    quantisation = _compare_config(search, tensors if whole else {})
    search.tokenizer()
    return search.result(
        "safetensors",
        files=len(loaded) - len(troubles),
        tensors=len(tensors),
        bytes_by_dtype=by_dtype,
        quantisation=None if quantisation is None else quantisation.method,
    )


@dataclass(frozen=True, slots=True)
class _Index:
    """What an index says: tensors by file, those files that are not there, and bytes of all tensors if it tells."""

    places: Mapping[str, set[str]]
    missing: frozenset[str]
    total_bytes: int | None


def _index(search: _Search, name: str = _INDEX) -> _Index | None:
    """The index; None without one that can be used."""
    if name not in search.names:
        return None
    trouble = search.no_content(name)
    if trouble:
        search.unusable({name: trouble}, 1)
        return None
    path = search.folder / name
    try:
        content = read_object(path, _MAX_INDEX_BYTES)
    except ConfigError as error:
        search.add(
            Level.ERROR, f"the index cannot be used: {str(error).removeprefix(f'{path}: ')}", name, "fetch it again"
        )
        return None
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    places: dict[str, set[str]] = defaultdict(set)
    for tensor, file in weight_map.items() if isinstance(weight_map, dict) else ():
        if not isinstance(file, str) or "/" in file:
            places.clear()
            break
        places[file].add(tensor)
    if not places:
        what = "the index has no weight_map of tensors to files of this folder"
        search.add(Level.ERROR, what, name, "fetch it again")
        return None
    missing = frozenset(places.keys() - search.names.keys())
    if missing:
        what = f"{len(missing)} of the {len(places)} files of the index are missing: {_shown(missing)}"
        search.add(Level.ERROR, what, name, "fetch the missing files")
    else:
        search.add(Level.OK, f"all {len(places)} files of the index are there", name)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    whole_number = isinstance(total, int | float) and not isinstance(total, bool) and math.isfinite(total)
    return _Index(places, missing, int(total) if whole_number and total is not None else None)


def _with_index(search: _Search, names: list[str], index: _Index) -> list[str]:
    """The files that an engine loads by the index."""
    surplus = set(names) - index.places.keys()
    if surplus:
        consolidated = all(name.startswith("consolidated") for name in surplus)
        search.add(
            Level.WARNING,
            f"{len(surplus)} files are not in the index: {_shown(surplus)}",
            "",
            "they are the model in its maker's own format; one of the two forms is enough"
            if consolidated
            else "another set of weights, or what an older one left: move it away, since some engines load every file",
        )
    return sorted(index.places.keys() - index.missing)


def _without_index(search: _Search, names: list[str]) -> list[str]:
    """The files that an engine loads if nothing says which are the model's: all."""
    sets: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        match = _SPLIT.fullmatch(name)
        sets[(match["stem"], int(match["count"])) if match else (name, 1)].add(name)
    if len(sets) > 1:
        kinds = [stem if count == 1 else f"{stem} in {count} files" for stem, count in sets]
        resharded = len({stem for stem, _ in sets}) < len(sets)
        search.add(
            Level.ERROR if resharded else Level.WARNING,
            f"{len(sets)} sets of weights lie side by side, and no index says which is the model's: {_shown(kinds)}",
            "",
            "keep one set with its model.safetensors.index.json; move the others away",
        )
    for (stem, count), there in sets.items():
        if count > 1:
            expected = {f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
            if expected - there:
                what = f"{len(expected - there)} of {count} files are missing: {_shown(expected - there)}"
                search.add(Level.ERROR, what, "", "fetch the missing files")
            step = "fetch it too: without it some engines do not load split weights"
            search.add(Level.WARNING, f"there is no {_INDEX} for the split files", "", step)
    return names


def _head(path: Path) -> dict[str, _Tensor] | _Trouble:
    """The tensors of a safetensors file, or why there are none."""
    again = "fetch the file again"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > _MAX_HEAD_BYTES:
                return _Trouble("does not begin like a safetensors file", again)
            if size < 8 + length:
                return _Trouble("is cut", again, f"it ends at byte {size}, within its head of {length} bytes")
            body = file.read(length)
    except OSError as error:
        return _Trouble("cannot be read", "look at its permissions and the disk", error.strerror or str(error))
    try:
        head = json.loads(body)
    except (ValueError, RecursionError):
        return _Trouble("has a broken head", again, "not JSON")
    if not isinstance(head, dict):
        return _Trouble("has a broken head", again, "no JSON object")
    head.pop("__metadata__", None)
    tensors: dict[str, _Tensor] = {}
    spans = []
    for name, entry in head.items():
        found = _tensor(entry)
        if found is None:
            return _Trouble("has a broken head", again, f"type, shape and place of tensor {name[:80]!r} do not fit")
        tensors[name], begin = found
        spans.append((begin, tensors[name].size_bytes))
    end = 0
    for begin, count in sorted(spans):
        if begin != end:
            return _Trouble("has a broken head", again, f"a gap or an overlap at byte {min(begin, end)} of the data")
        end += count
    data = size - 8 - length
    if data < end:
        return _Trouble("is cut", again, f"{end - data} of {end} bytes of data are not there")
    if data > end:
        return _Trouble("is longer than its head says", again, f"by {data - end} bytes")
    return tensors


def _tensor(entry: Any) -> tuple[_Tensor, int] | None:
    """(a tensor, where its data begins); None if the entry is not right."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = math.prod(shape) * _DTYPE_BITS[dtype]
        fits = 0 <= begin <= end < 2**63 and (end - begin) * 8 == bits and (not shape or min(shape) >= 0)
    except (TypeError, ValueError, LookupError):
        return None
    # A fraction anywhere makes the product one.
    if not fits or type(shape) is not list or {type(bits), type(begin), type(end)} != {int}:
        return None
    return _Tensor(dtype, len(shape), end - begin), begin


# --- against the configuration -------------------------------------------------------------------------------------


def _compare_config(search: _Search, tensors: Mapping[str, _Tensor]) -> Quantization | None:
    """What `config.json` says of quantisation, and whether it is true of these tensors; none are not compared."""
    name = "config.json"
    path = search.folder / name
    if name not in search.names:
        step = "fetch config.json too; an engine cannot load a model without it"
        search.add(Level.ERROR, "there is no config.json beside the weights", "", step)
        return None
    trouble = search.no_content(name)
    if trouble:
        search.unusable({name: trouble}, 1)
        return None
    try:
        config = read_object(path)
        quantisation = read_quantization(config, str(path), search.folder)
    except ConfigError as error:
        what = f"config.json: {str(error).removeprefix(f'{path}: ')}"
        search.add(Level.ERROR, what, name, "fetch it again if it is broken; else look whether the engine knows it")
        return None
    if tensors:
        _compare_schemes(search, tensors, quantisation)
        _compare_dtype(search, tensors, config)
    return quantisation


def _stored(name: str) -> tuple[str, str] | None:
    """(module, which of its tensors this is) for weights of the text model; None for scales, biases and the like."""
    stem, _, last = name.rpartition(".")
    if last.endswith("_blocks"):
        stem, last = name.removesuffix("_blocks"), "blocks"
    elif last.endswith("_proj"):
        stem, last = name, "weight"
    elif last not in ("weight", "qweight", "weight_packed"):
        return None
    # Engines pass over the part of a model that sees and hears, whether or not a list of modules does.
    return None if "visual" in name or "vision" in name or "audio" in name else (stem, last)


def _compare_schemes(search: _Search, tensors: Mapping[str, _Tensor], quantisation: Quantization) -> None:
    main = quantisation.scheme
    seen: set[Scheme] = set()
    plain: Counter[str] = Counter()
    quantised: Counter[str] = Counter()
    for name, tensor in tensors.items():
        stored = _stored(name)
        if stored is None:
            continue
        module, kind = stored
        scheme = quantisation.scheme_of(module)
        if scheme is not None and kind == scheme.tensor and tensor.dtype in scheme.dtypes:
            seen.add(scheme)
        elif scheme is not None and tensor.dtype in _PLAIN_DTYPES.values() and tensor.dimensions > 1:
            plain[name] = tensor.size_bytes
        elif scheme is None and tensor.dtype in _QUANTISED:
            quantised[name] = tensor.size_bytes
    by_dtype = _bytes_by_dtype(tensors.values())
    total = sum(by_dtype.values())
    kinds = ", ".join(f"{dtype} {_size(count)}" for dtype, count in list(by_dtype.items())[:_SHOWN])
    versions = "config.json and weights are of two versions of the model; fetch both from one place"
    if main is not None and main not in seen:
        dtypes = " or ".join(main.dtypes)
        what = f"config.json says {quantisation.method}, but no tensor it speaks of is a {main.tensor} of type {dtypes}"
        search.add(Level.ERROR, f"{what}; the files hold {kinds}", "config.json", versions)
        return
    agrees = True
    if plain.total() > _NOTABLE_RATIO * total:
        agrees = False
        what = f"{_size(plain.total())} of weights are not quantised, though config.json says {quantisation.method}"
        step = "budget by the bytes of the files; the list of modules that are left out may be short"
        search.add(Level.WARNING, f"{what}: {_shown(plain)}", "config.json", step)
    if quantised.total() > _NOTABLE_RATIO * total:
        agrees = False
        says = "says nothing of it" if main is None else "leaves these modules out"
        what = f"{_size(quantised.total())} of weights are quantised ({kinds}), but config.json {says}"
        level = Level.ERROR if main is None else Level.WARNING
        search.add(level, f"{what}: {_shown(quantised)}", "config.json", versions)
    if agrees:
        what = "not quantised" if main is None else quantisation.method
        search.add(Level.OK, f"{what}, as config.json says: {kinds}", "config.json")


def _bytes_by_dtype(tensors: Iterable[_Tensor]) -> dict[str, int]:
    """Bytes by type, most first."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[tensor.dtype] += tensor.size_bytes
    return dict(found.most_common())


def _compare_dtype(search: _Search, tensors: Mapping[str, _Tensor], config: Mapping[str, Any]) -> None:
    """Whether most weights that are not quantised have the type that the configuration names."""
    text = config.get("text_config")
    parts = (config, text) if isinstance(text, Mapping) else (config,)
    stated = next((part[key] for part in parts for key in ("torch_dtype", "dtype") if part.get(key)), None)
    expected = _PLAIN_DTYPES.get(stated.removeprefix("torch.")) if isinstance(stated, str) else None
    matrices = (tensor for name, tensor in tensors.items() if tensor.dimensions > 1 and _stored(name))
    by_dtype = _bytes_by_dtype(matrices)
    found = next((dtype for dtype in by_dtype if dtype in _PLAIN_DTYPES.values()), None)
    if expected is None or found is None or found == expected:
        return
    what = f"config.json says {stated}, but most weights that are not quantised are {found} ({_size(by_dtype[found])})"
    step = "engines convert while they load: budget by the type that the engine is told, not by the files"
    search.add(Level.WARNING, what, "config.json", step)


# --- other formats -------------------------------------------------------------------------------------------------


def _check_gguf(search: _Search, names: list[str]) -> WeightsCheck:
    search.leftovers()
    models: dict[str, list[str]] = {}
    for name in names:
        models.setdefault(part_names(Path(name))[0], []).append(name)
    # A projector of images belongs to a model and is none.
    main = [first for first in models if not first.startswith("mmproj")]
    if not main:
        step = "fetch the model's own file too"
        search.add(Level.ERROR, "there is a projector of images, but no model that it belongs to", "", step)
    if len(main) > 1:
        what = f"{len(main)} models lie side by side: {_shown(main)}"
        search.add(Level.WARNING, what, "", "name the file that the server loads")
    results = {first: _check_gguf_model(search, there) for first, there in models.items()}
    found = results[main[0]] if len(main) == 1 else None
    if found is None:
        return search.result("gguf", files=len(names))
    files, tensors, by_dtype, quantisation = found
    return search.result("gguf", files=files, tensors=tensors, bytes_by_dtype=by_dtype, quantisation=quantisation)


def _check_gguf_model(search: _Search, names: list[str]) -> tuple[int, int, dict[str, int], str] | None:
    troubles = {name: trouble for name in names if (trouble := search.no_content(name))}
    if troubles:
        search.unusable(troubles, len(names))
        return None
    path = search.folder / names[0]
    try:
        found = read_gguf(path, whole=False)
    except ConfigError as error:
        search.add(Level.ERROR, str(error).removeprefix(f"{path}: "), names[0], "fetch the file again")
        return None
    if found.missing_parts:
        count = len(found.parts) + len(found.missing_parts)
        what = f"{len(found.missing_parts)} of {count} files are missing: {_shown(found.missing_parts)}"
        search.add(Level.ERROR, what, names[0], "fetch the missing files")
    for part in found.parts:
        if part.missing_bytes:
            what = f"{part.path.name} is cut: {part.missing_bytes} of {part.needed_bytes} bytes are not there"
            search.add(Level.ERROR, what, part.path.name, "fetch the file again")
    if not found.missing_parts and not any(part.missing_bytes for part in found.parts):
        what = f"{len(found.tensors)} tensors of {_size(sum(found.bytes_by_type.values()))}, {found.quantisation}"
        search.add(Level.OK, f"{what}, as long as they say", names[0])
    if found.architecture not in (None, "clip") and "tokenizer.ggml.model" not in found.metadata:
        step = "convert the model anew, with its tokenizer"
        search.add(Level.ERROR, "there is no tokenizer in the file", names[0], step)
    return len(found.parts), len(found.tensors), found.bytes_by_type, found.quantisation


def _check_pickles(search: _Search, names: list[str]) -> WeightsCheck:
    """Files that hold Python objects are not opened: they have no head that could be read without running them."""
    search.leftovers()
    search.unusable({name: trouble for name in names if (trouble := search.no_content(name))}, len(names))
    _index(search, "pytorch_model.bin.index.json")
    search.add(
        Level.WARNING,
        f"{len(names)} files are in PyTorch's own format, which cannot be checked without running what is in them",
        "",
        "prefer the model's safetensors files",
    )
    quantisation = _compare_config(search, {})
    search.tokenizer()
    return search.result(
        "pytorch", files=len(names), quantisation=None if quantisation is None else quantisation.method
    )
