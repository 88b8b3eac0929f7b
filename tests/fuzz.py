"""Damage real stores and models in random ways, and read them: only errors of ours, or the truth.

``python tests/fuzz.py --count 100000 --seed 0`` makes that many cases; ``--only 4711`` one of them,
told in full. A case is a copy of a store or a model with one fault, or a few:

- bytes of a file flipped, cut off, inserted, overwritten;
- a value, key or item of a JSON description changed, half of the time with the checksums made right
  again, as somebody hostile would;
- files and folders deleted, exchanged, doubled, made links, pipes or folders.

It is opened, read as a whole and asked. What may come of it: an error of ours, of one line; or an
answer, which without made-up checksums is bit-equal to that of the intact one. What is a finding:
any other exception, a case that takes longer than its limit, memory beyond the limit, code that is
run, a file that is written.
"""

import argparse
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
from fuzz_victims import VICTIMS, make_victims

from cme_dask.cli.describe import describe
from cme_dask.data.store import sealed
from cme_dask.errors import CmeDaskError

SECONDS = 10.0
"""Of a case, on a machine that does other things as well; some milliseconds are usual."""

MEMORY = 3 << 30
"""Bytes of address space that reading may take beyond what is in use before."""


class Finding(Exception):
    """What must not happen."""


# What is read ----------------------------------------------------------------------------------


def read(name, path, told):
    """Everything that can be asked for, as a list of arrays and texts."""
    if told and name != "sums":  # no output of a command
        json.dumps(describe(str(path)), default=str)
    return VICTIMS[name].read(path)


def same(a, b):
    return len(a) == len(b) and all(
        one == other if isinstance(one, str) else np.array_equal(one, other, equal_nan=True)
        for one, other in zip(a, b, strict=True)
    )


# What is done to them --------------------------------------------------------------------------

HOSTILE = [
    *(None, True, False, 0, 1, -1, 3, 10**15, -(10**15), 1 << 63, 10**400, 0.5, 1e308, -0.0),
    *(math.nan, math.inf, "", "x", "float64", "../../../etc/passwd", "/etc/passwd", "a\0b", "NaN"),
    *("pickle", "|O", "__import__('os').system('true')", "\ud800", "x" * 100_000, [], {}, [[]]),
    *([None], {"": None}, {"name": "numcodecs.pickle", "configuration": {}}, [0], [10**9] * 3),
    *({"name": "transpose", "configuration": {"order": [1, 0]}}, {"type": "Custom", "name": "os"}),
    {"name": "sharding_indexed", "configuration": {"chunk_shape": [1], "codecs": []}},
]


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def files_of(path):
    return sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink())


def spoil_bytes(rng, path):
    file = rng.choice(files_of(path))
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) + 1)
    how = rng.choice(["flip", "flip", "flip", "cut", "insert", "overwrite", "double", "empty"])
    if how == "flip" and data:
        data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "insert":
        data[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
    elif how == "overwrite":
        noise = rng.choice([b"\0", b"\xff", rng.randbytes(1)]) * rng.choice([1, 8, 64])
        data[at : at + len(noise)] = noise
    elif how == "double":
        data += bytes(data)
    else:
        data.clear()
    file.write_bytes(bytes(data))
    return f"{how} at {at} of {file.relative_to(path)}"


def places(value, found):
    """Every container of a JSON value with a key or position of it."""
    if isinstance(value, dict):
        for key, item in value.items():
            found.append((value, key))
            places(item, found)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            found.append((value, i))
            places(item, found)
    return found


def spoil_json(rng, path):
    file = rng.choice([f for f in files_of(path) if f.name == "zarr.json"])
    if rng.random() < 0.5 and path / "zarr.json" in files_of(path):  # a pipe would be waited for
        file = path / "zarr.json"
    try:
        data = json.loads(file.read_text())
        box, key = rng.choice(places(data, []))
    except (ValueError, IndexError, OSError):
        return "nothing"
    how = rng.choice(["set", "set", "set", "set", "delete", "add", "swap", "nest"])
    if how == "set":
        box[key] = rng.choice(HOSTILE)
    elif how == "delete":
        del box[key]
    elif how == "add" and isinstance(box, dict):
        box[rng.choice(["", "x", "../x", "shape", "kernel", "residual"])] = rng.choice(HOSTILE)
    elif how == "add":
        box.insert(key, rng.choice([box[key], *HOSTILE]))
    elif how == "swap":
        other, place = rng.choice(places(data, []))
        with contextlib.suppress(LookupError):
            box[key] = json.loads(json.dumps(other[place]))
    else:
        box[key] = nested(rng.choice([50, 400]))
    forged = rng.random() < 0.5 and forge(data)
    file.write_text(json.dumps(data))
    return f"{how} {str(key)[:40]!r} of {file.relative_to(path)}{' forged' if forged else ''}"


def forge(data):
    """Make the checksum of a description right again."""
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        about = data["attributes"]["cme_dask"]
        about.pop("checksum", None)
        data["attributes"]["cme_dask"] = sealed(about)
        return True
    return False


def forge_values(rng, path):
    """Other values in a small array, with all checksums right."""
    import zarr

    from cme_dask.data.store import write_array

    if any(not (p.is_file() or p.is_dir()) or p.is_symlink() for p in path.rglob("*")):
        return "nothing"  # zarr itself would wait for a pipe
    root = zarr.open_group(str(path), mode="r+")
    about = dict(root.attrs["cme_dask"])
    inside = root["row_sample"] if about["kind"] == "sample" else root
    listed = about["row_sample" if about["kind"] == "sample" else "arrays"]
    name = rng.choice(sorted(listed))
    values = np.array(inside[name][...])
    how = rng.choice(["nan", "huge", "zero", "negative", "short", "long", "flat", "int8", "text"])
    numbers = {"nan": np.nan, "huge": 1e300, "zero": 0.0, "negative": -3.0}
    if how in numbers:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values.flat[rng.randrange(values.size or 1) :] = numbers[how]
    elif how == "text":
        values = values.astype("U8")
    else:
        changes = {
            "short": values[:-1],
            "long": np.concatenate([values] * 2),
            "flat": values.ravel(),
        }
        values = changes.get(how, np.nan_to_num(values).astype("i1"))
    del inside[name]
    listed[name] = write_array(inside, name, values)
    about.pop("checksum")
    root.attrs["cme_dask"] = sealed(about)
    return f"{how} values of {name} forged"


def spoil_files(rng, path):
    everything = sorted(path.rglob("*"))
    one, other = rng.choice(everything), rng.choice(everything)
    how = rng.choice(
        ["delete", "swap", "copy", "rename", "link", "loop", "pipe", "device", "folder", "stray"]
    )
    told = f"{how} {one.relative_to(path)} {other.relative_to(path)}"
    if how == "swap" and one != other and one.is_file() and other.is_file():
        a, b = one.read_bytes(), other.read_bytes()
        one.write_bytes(b)
        other.write_bytes(a)
        return told
    if how == "copy" and one.is_file() and other.is_file():
        other.write_bytes(one.read_bytes())
        return told
    if how == "rename":
        with contextlib.suppress(OSError):
            one.rename(one.with_name(rng.choice(["x", "0", "1", "zarr.json", "c", ".zarray"])))
        return told
    if how == "stray":
        (one if one.is_dir() else one.parent).joinpath(
            rng.choice([".zgroup", "zarr.json.partial", "q"])
        ).write_bytes(b"{}")
        return told
    if one.is_dir():
        shutil.rmtree(one)
    else:
        one.unlink()
    if how == "link":
        one.symlink_to(
            rng.choice(["/etc/passwd", "/etc", str(other), "../..", "nowhere", "/dev/zero"])
        )
        return told
    if how == "loop":
        one.symlink_to(one.name)
    elif how == "pipe":
        os.mkfifo(one)
    elif how == "device":
        one.symlink_to("/dev/zero")
    elif how == "folder":
        one.mkdir()
    return told


KINDS = {spoil_bytes: 5, spoil_json: 6, spoil_files: 3, forge_values: 2}


# The trial -------------------------------------------------------------------------------------


class Watch:
    """Tells of code that is run and of files that are written, in any thread, while it is on."""

    FORBIDDEN = (
        *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"),
        *("subprocess.Popen", "pickle.find_class", "socket.connect", "os.remove", "os.rename"),
        *(
            "os.mkdir",
            "os.rmdir",
            "os.link",
            "os.symlink",
            "os.truncate",
            "os.chmod",
            "ctypes.dlopen",
        ),
    )
    WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def __init__(self):
        self.on = False
        self.seen = []
        sys.addaudithook(self._hook)

    def _hook(self, event, args):
        if not self.on:
            return
        if event in self.FORBIDDEN:
            self.seen.append(f"{event} {args!r}"[:200])
        elif event == "open":
            flags = args[2] if isinstance(args[2], int) else 0
            if flags & self.WRITING or any(c in str(args[1] or "") for c in "wax+"):
                self.seen.append(f"open {args!r}"[:200])
        elif event in ("exec", "compile"):
            name = getattr(args[0], "co_filename", None) if event == "exec" else args[1]
            if (event, name) == ("compile", "<unknown>"):
                return  # ast.parse, by which Python shows a line in a traceback: what ran is "exec"
            if name is not None and not os.path.exists(str(name)) and "frozen" not in str(name):
                self.seen.append(f"{event} {name}")


def too_long(*_):
    raise Finding(f"takes longer than {SECONDS:g} s")


def drawn(number, seed):
    """Who is damaged in a case, and a generator for what is done to it."""
    rng = random.Random(f"{seed}/{number}")
    shares = [victim.share for victim in VICTIMS.values()]
    return rng.choices(list(VICTIMS), shares)[0], rng


def trial(number, seed, victims, truths, watch, folder):
    """One case: what was done, and what came of it; Finding if it must not."""
    name, rng = drawn(number, seed)
    path = folder / "case"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(victims[name], path)
    faults = rng.choice([1, 1, 1, 2, 3])
    done = []
    for _ in range(faults):
        with contextlib.suppress(Exception), warnings.catch_warnings():  # what is damaged already
            warnings.simplefilter("ignore")
            done.append(rng.choices(list(KINDS), KINDS.values())[0](rng, path))
    told = f"{name}: {'; '.join(done)}"
    any_answer = len(done) > 1 or any("forged" in d for d in done)
    watch.seen.clear()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    watch.on = True
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = read(name, path, told=number % 10 == 0)
        outcome = "answer"
    except CmeDaskError as error:
        outcome = type(error).__name__
        if "\n" in str(error) or len(str(error)) > 3000:
            raise Finding(f"{told}: not one sentence: {error}"[:3000]) from error
    except Finding as error:
        raise Finding(f"{told}: {error}") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Finding(f"{told}: {type(error).__name__}: {error}"[:1000]) from error
    finally:
        watch.on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    if watch.seen:
        raise Finding(f"{told}: {watch.seen[0]}")
    if outcome == "answer" and not any_answer and not same(answer, truths[name]):
        raise Finding(f"{told}: another answer")
    return told, outcome


def fuzz(count, seed, only=None, progress=lambda text: None):
    """Outcomes counted, and findings by number."""
    outcomes, findings = Counter(), {}
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    before = signal.signal(signal.SIGALRM, too_long)
    watch = WATCH
    try:
        with tempfile.TemporaryDirectory(dir=shm, prefix="cme-dask-fuzz-") as place:
            folder = Path(place)
            numbers = only or range(count)
            victims = make_victims(folder, {drawn(number, seed)[0] for number in numbers})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                truths = {name: read(name, path, told=True) for name, path in victims.items()}
            begin = time.monotonic()
            for number in numbers:
                try:
                    told, outcome = trial(number, seed, victims, truths, watch, folder)
                    outcomes[outcome] += 1
                    if only is not None:
                        progress(f"{number}: {told}: {outcome}")
                except Finding as error:
                    findings[number] = error
                    progress(f"FINDING {number}: {error}")
                    if only is not None:
                        traceback.print_exception(error)
                if number and number % 1000 == 0:
                    spent = time.monotonic() - begin
                    progress(
                        f"{number:,} cases, {spent / number * 1e3:.1f} ms each, {dict(outcomes)}"
                    )
    finally:
        signal.signal(signal.SIGALRM, before)
    return outcomes, findings


WATCH = Watch()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="Numbers of single cases.")
    wanted = parser.parse_args()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    outcomes, findings = fuzz(
        wanted.count, wanted.seed, wanted.only, lambda text: print(text, flush=True)
    )
    total = sum(outcomes.values()) + len(findings)
    print(f"{total:,} cases: {dict(outcomes)}, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
