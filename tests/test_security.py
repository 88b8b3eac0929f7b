"""Hostile files, jobs and events run no code, write nothing, and take little memory."""

import ast
import contextlib
import json
import os
import pickle
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import dask
import fuzz
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from conftest import write_store

import cme_dask
from cme_dask import (
    EmbeddingClassifier,
    JointClassifier,
    PivotedCholesky,
    SparseEmbedding,
    kernels,
    load,
    open_sample,
)
from cme_dask.cli import cli
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.runner import OUTPUTS
from cme_dask.cli.schema import read_job
from cme_dask.data.columns import Columns
from cme_dask.data.store import sealed
from cme_dask.data.zarr_reader import ZarrTableSource
from cme_dask.errors import DataError, ResourceError, StoreError
from cme_dask.models.events import Event
from cme_dask.models.sparse import SparseModel
from cme_dask.passes.cluster import connected

PACKAGE = Path(cme_dask.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
PIVOTS = "basis_newton_points"
"""An array of the saved model."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("security")
    x = np.random.default_rng(1).normal(size=(300, 2))
    write_store(folder / "s", x, x[:, :1], chunk_rows=100)
    PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(x).save(folder / "m")
    return folder


@pytest.fixture
def store(tmp_path, pristine):
    return shutil.copytree(pristine / "s", tmp_path / "s")


@pytest.fixture
def model(tmp_path, pristine):
    return shutil.copytree(pristine / "m", tmp_path / "m")


class Booby:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace):
        self._trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self._trace,)


def edit(path, change, *, honest=False):
    about = json.loads(path.read_text())
    change(about)
    if honest:
        described = about["attributes"]["cme_dask"]
        described.pop("checksum", None)
        about["attributes"]["cme_dask"] = sealed(described)
    path.write_text(json.dumps(about))


# Terminals and clusters ------------------------------------------------------------------------


def shown(*args):
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    return done.exit_code, done.stdout + done.stderr


def test_names_are_no_commands_to_the_terminal(tmp_path):
    name = "\x1b]0;owned\x07a\u202eb"
    x = np.random.default_rng(1).normal(size=(300, 1))
    store = write_store(tmp_path / "s", x, x, x_names=[name], y_names=["y"])
    fit = PivotedCholesky(kernels.Gaussian(1.0), tol=0.5).fit(store)
    fit.save(tmp_path / "m")
    texts = [repr(open_sample(store)), repr(fit.model_), repr(DataError(f"no {name}"))]
    texts += [shown("info", store)[1], shown("info", tmp_path / "m")[1]]
    texts += [shown("fit", store, "--out", tmp_path / "n", "--x", "a")[1]]
    for text in texts:
        assert r"\x1b]0;owned\x07a\u202eb" in text.replace("\\\\", "\\")
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_results_are_printed_in_any_encoding(tmp_path):
    x = np.random.default_rng(1).normal(size=(300, 1))
    store = write_store(tmp_path / "s", x, x, x_names=["é ± μ"], y_names=["y"])
    done = CliRunner(charset="ascii").invoke(cli, ["info", str(store)])
    assert done.exit_code == 0, done.exception
    assert "? ? ?" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
def test_a_full_disk_ends_the_log_and_not_the_run(store, tmp_path):
    asked = "features", store, "--out", tmp_path / "m", "--tol", "0.5", "--log", "/dev/full"
    code, text = shown(*asked)
    assert (code, text.count("the log /dev/full can't be written")) == (0, 1), text
    assert "Traceback" not in text
    assert load(tmp_path / "m").rank > 0


def test_certificates_are_for_encrypted_clusters(store, tmp_path, monkeypatch):
    monkeypatch.setattr("cme_dask.passes.cluster._CONNECT_SECONDS", 1)
    certificate = tmp_path / "ca.pem"
    certificate.touch()
    asked = "features", store, "--out", tmp_path / "m", "--scheduler", "tcp://127.0.0.1:9"
    code, text = shown(*asked, "--tls-ca-file", certificate)
    assert code == 2
    assert "of no use for tcp://127.0.0.1:9, which is not encrypted" in text
    with (
        dask.config.set({"distributed.comm.tls.client.cert": str(certificate)}),
        pytest.warns(UserWarning, match="not encrypted, although Dask's configuration has"),
        pytest.raises(ResourceError, match="no scheduler answers"),
        connected("tcp://127.0.0.1:9"),
    ):
        pass


# Code ------------------------------------------------------------------------------------------


def test_nothing_unpickles_or_evaluates():
    forbidden = {"eval", "exec", "compile", "__import__"}
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", None)
                assert name not in forbidden, f"{path}:{node.lineno} calls {name}"
                arguments = {k.arg: k.value for k in node.keywords}
                assert "allow_pickle" not in arguments, f"{path}:{node.lineno}"
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
                assert not names & modules, f"{path}:{node.lineno}"
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] not in modules, f"{path}:{node.lineno}"


OBJECTS = [
    {"dtype": "|O", "filters": [{"id": "pickle"}], "compressor": None},
    {"dtype": "|O", "filters": [{"id": "vlen-utf8"}, {"id": "pickle"}], "compressor": None},
    {"dtype": "|O", "filters": [{"id": "vlen-utf8"}], "compressor": {"id": "pickle"}},
    {"dtype": "<f8", "filters": [{"id": "pickle"}], "compressor": None},
    {"dtype": "<f8", "filters": None, "compressor": {"id": "pickle"}},
]


@pytest.mark.parametrize("form", OBJECTS, ids=lambda f: f"{f['dtype']} {f['filters']}"[:30])
def test_codecs_that_run_code_are_refused(tmp_path, form, monkeypatch):
    from numcodecs import pickles

    # As in versions of numcodecs that don't refuse by themselves.
    monkeypatch.setattr(pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    trace = tmp_path / "trace"
    about = {"zarr_format": 2, "shape": [2], "chunks": [2], "order": "C", "fill_value": None}
    (tmp_path / "z/x").mkdir(parents=True)
    (tmp_path / "z/.zgroup").write_text('{"zarr_format": 2}')
    (tmp_path / "z/x/.zarray").write_text(json.dumps(about | form))
    (tmp_path / "z/x/0").write_bytes(pickle.dumps(Booby(trace)))
    for read in (
        lambda: open_sample(tmp_path / "z"),
        lambda: open_sample(tmp_path / "z/x"),
        lambda: cme_dask.load(tmp_path / "z"),
        lambda: ZarrTableSource(str(tmp_path / "z")).columns(),
        lambda: ZarrTableSource(str(tmp_path / "z/x")).columns(),
    ):
        with pytest.raises(DataError):
            read()
        assert not trace.exists()


def test_object_arrays_of_numpy_files_are_refused(tmp_path):
    trace = tmp_path / "trace"
    np.save(tmp_path / "x.npy", np.array([Booby(trace)]), allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=np.array([Booby(trace), 1]))
    for name in ("x.npy", "x.npz"):
        asked = "ingest", tmp_path / name, "--out", tmp_path / "s", "--x", "x", "--y", "y"
        done = CliRunner().invoke(cli, [str(a) for a in asked])
        assert done.exit_code == 2, done.stderr
        assert "\n" not in done.stderr.strip()
    assert not trace.exists()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').mkdir('trace') > 0",
        "a > __import__('os').mkdir('trace')",
        "a > (lambda: 1)()",
        "a > 1 and open('trace', 'w')",
        "[a > 1 for a in (1,)]",
        "a > (b := 1)",
        "(" * 300 + "a" + ")" * 300 + " > 1",
        "not " * 3000 + "a > 1",
        "a" + " + a" * 3000 + " > 1",
        "a > 1" + " " * 20000,
        "a > 1; import os",
        "a.__class__ > 1",
        "exec('1') > 1",
        "a > 1e999",
        "a > nan",
    ],
)
def test_events_are_parsed(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError):
        Event.parse(text, ("a", "b"))
    assert list(tmp_path.iterdir()) == []


# Places ----------------------------------------------------------------------------------------


def test_links_out_of_the_folder_are_refused(store, model, tmp_path):
    for folder, name in (
        (store, "x/zarr.json"),
        (model, "basis_newton_points/c/0/0"),
        (model, "basis_newton_rows"),
    ):
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match=r"leads out of the folder: copy it with its links"):
            open_sample(folder) if folder == store else cme_dask.load(folder)
        (folder / name).unlink()
        (tmp_path / "elsewhere").rename(folder / name)
    cme_dask.load(model)
    (tmp_path / "link").symlink_to(model)  # the folder itself may be one
    cme_dask.load(tmp_path / "link")


@pytest.mark.parametrize("what", ["pipe", "device", "loop"])
@pytest.mark.parametrize("name", ["zarr.json", f"{PIVOTS}/zarr.json", f"{PIVOTS}/c/0/0"])
def test_nothing_that_never_ends_is_read(model, name, what):
    (model / name).unlink()
    if what == "pipe":
        os.mkfifo(model / name)
    else:
        (model / name).symlink_to("/dev/zero" if what == "device" else Path(name).name)
    with pytest.raises(StoreError):
        cme_dask.load(model)


def test_names_do_not_lead_out(model, tmp_path):
    """Names of arrays come from the manifest, or from metadata that claim to be of members."""
    (tmp_path / "out").mkdir()
    shutil.move(model / "basis_newton_points", tmp_path / "out/basis_newton_points")

    def listed(about):
        arrays = about["attributes"]["cme_dask"]["arrays"]
        arrays["../out/basis_newton_points"] = arrays.pop("basis_newton_points")

    edit(model / "zarr.json", listed, honest=True)
    with pytest.raises(StoreError, match="has a damaged list of arrays"):
        cme_dask.load(model)

    def consolidated(about):
        about["attributes"]["cme_dask"].pop("arrays")
        inside = {
            "../out/basis_newton_points": json.loads(
                (tmp_path / "out/basis_newton_points/zarr.json").read_text()
            )
        }
        about["consolidated_metadata"] = {"kind": "inline", "must_understand": False}
        about["consolidated_metadata"]["metadata"] = inside

    edit(model / "zarr.json", consolidated, honest=True)
    with pytest.raises(StoreError):
        cme_dask.load(model)


def test_jobs_write_to_their_folder_alone(tmp_path):
    assert all(Path(name).name == name for name in OUTPUTS.values())
    job = tmp_path / "job.toml"
    text = "[sample]\nrows = 100\n[fit]\n{}\n"
    for line in ('out = "/tmp/x"', "[fit.kernel_x]\ntype = 'Custom'\nname = 'os'", "tol = 'exec'"):
        job.write_text('title = "a"\n' + text.format(line))
        with pytest.raises(DataError):
            read_job(job)
    for key in ("out", "outputs", "model", "sample.path", "report.picture", "fit.checkpoint"):
        job.write_text('title = "a"\n' + text.format(""))
        with pytest.raises(DataError, match="unknown key"):
            read_job(job, [f'{key}="../../x"'])
    job.write_text('title = "a"\n[ingest]\nfiles = ["../secret.csv"]\nx = ["a"]\ny = ["b"]\n')
    assert tomllib.loads(job.read_text())["ingest"]["files"] == list(read_job(job).ingest.files)


def test_links_in_the_output_folder_are_not_followed(tmp_path, pristine):
    """A link in the place of an output is refused or replaced; what it leads to stays."""
    out, precious = tmp_path / "out", tmp_path / "precious"
    shutil.copytree(pristine / "m", precious)
    out.mkdir()
    (out / OUTPUTS["model"]).symlink_to(precious)
    with pytest.raises(DataError, match="already holds"):
        prepare_folder(out, OUTPUTS.values(), overwrite=False)
    cme_dask.load(precious).save(out / OUTPUTS["model"], overwrite=True)
    assert not (out / OUTPUTS["model"]).is_symlink()
    cme_dask.load(precious)


# Memory ----------------------------------------------------------------------------------------


def test_claims_of_size_cost_nothing(model, store):
    """What is claimed is compared with what is there before memory is taken."""
    huge = 10**15

    def resize(about):
        about["shape"] = [huge, 2]
        about["chunk_grid"]["configuration"]["chunk_shape"] = [huge, 2]

    cases = [
        (model, PIVOTS, "arrays", resize, "chunks of 16,000,000,000,000,000 bytes"),
        (
            model,
            "basis_newton_points",
            "arrays",
            lambda a: a.update(shape=[huge, 2]),
            "is cut into .* chunks",
        ),
        (
            store,
            "x",
            None,
            lambda a: a.update(shape=[huge, 2]),
            "claims 1,000,000,000,000,000 rows",
        ),
        (store, "x", None, resize, "chunks of 16,000,000,000,000,000 bytes"),
    ]
    for folder, name, listed, change, message in cases:
        kept = {path: path.read_text() for path in folder.rglob("zarr.json")}
        edit(folder / name / "zarr.json", change)
        shape = json.loads((folder / name / "zarr.json").read_text())["shape"]

        def claim(about, name=name, listed=listed, shape=shape):
            described = about["attributes"]["cme_dask"]
            if listed is None:
                described["rows"] = shape[0]
            else:
                described[listed][name]["shape"] = shape

        edit(folder / "zarr.json", claim, honest=True)
        with pytest.raises(StoreError, match=message):
            cme_dask.load(folder) if folder == model else open_sample(folder)
        for path, text in kept.items():
            path.write_text(text)


def test_rows_that_are_not_there_are_missed_at_once(store):
    """The folder is listed: no pass has to look for the chunks of so many rows."""
    for name, width in (("x", 2), ("y", 1)):
        edit(store / name / "zarr.json", lambda a, d=width: a.update(shape=[10**12, d]))
    edit(
        store / "zarr.json", lambda a: a["attributes"]["cme_dask"].update(rows=10**12), honest=True
    )
    with pytest.raises(StoreError, match=r"chunk x/c/3/0 of .* is missing"):
        open_sample(store)


def test_bombs_do_not_go_off(model, store):
    """A Blosc frame that says it unpacks to 2 GB, with a checksum that is right."""
    from google_crc32c import value

    for file, read in (
        (model / "basis_newton_points/c/0/0", lambda: cme_dask.load(model)),
        (store / "x/c/1/0", lambda: open_sample(store).sources[0].read(0, 300)),
    ):
        frame = bytearray(file.read_bytes()[:-4])
        frame[4:8] = (2**31 - 64).to_bytes(4, "little")
        file.write_bytes(bytes(frame) + value(bytes(frame)).to_bytes(4, "little"))
        with pytest.raises(StoreError, match=r"unpacks to 2,147,483,584 bytes, not to"):
            read()
    with (store / "x/c/1/0").open("wb") as file:
        file.truncate(1 << 40)  # a file with a hole
    with pytest.raises(StoreError, match=r"has 1,099,511,627,776 bytes for values of"):
        open_sample(store).sources[0].read(0, 300)


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        ([{"name": "transpose", "configuration": {"order": [1, 0]}}], "TransposeCodec among"),
        ([{"name": "bytes", "configuration": {"endian": "big"}}], "BytesCodec among"),
        ([{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}], "GzipCodec among"),
        ([{"name": "numcodecs.pickle", "configuration": {}}], "is damaged .*Unknown codec"),
    ],
)
def test_codecs_of_others_are_refused(model, store, codecs, message):
    def change(about):
        if codecs[0]["name"] == "transpose":
            about["codecs"].insert(0, *codecs)
        else:
            about["codecs"] = codecs

    edit(model / "basis_newton_points/zarr.json", change)
    edit(store / "x/zarr.json", change)
    with pytest.raises(StoreError, match=message):
        cme_dask.load(model)
    with pytest.raises(StoreError, match=message):
        open_sample(store)


def test_deep_and_odd_descriptions(model):
    for text in ("[" * 100_000, '{"a":' * 5000, '{"zarr_format": NaN}', '{"zarr_format": 1e999}'):
        (model / "zarr.json").write_text(text)
        with pytest.raises(StoreError):
            cme_dask.load(model)


def test_long_names_are_cheap():
    with pytest.raises(DataError, match="expected a list of texts"):
        Columns.from_dict({"names": "x" * 100_000, "units": {}, "categories": {}})
    many = tuple(f"x{i}" for i in range(200_000))
    assert len(Columns(many).names) == 200_000


def test_missing_chunks_of_groups_are_seen_in_any_store(store):
    """Where no folder can be listed, a chunk of nothing but the fill value is looked for."""
    memory = zarr.storage.MemoryStore()
    for file in store.rglob("*"):
        if file.is_file() and file != store / "x/c/1/0":
            data = zarr.core.buffer.cpu.Buffer.from_bytes(file.read_bytes())
            zarr.core.sync.sync(memory.set(str(file.relative_to(store)), data))
    sample = open_sample(zarr.open_group(memory, mode="r"))
    assert sample.sources[0].read(0, 100).shape == (100, 2)
    with pytest.raises(StoreError, match=r"chunk x/c/1/0 of .* is missing"):
        sample.sources[0].read(0, 300)


# Anything --------------------------------------------------------------------------------------


def test_fuzzing_in_brief():
    outcomes, findings = fuzz.fuzz(10, seed=1234)
    assert findings == {}
    assert outcomes["StoreError"] > 5
    assert outcomes["answer"] > 0


def test_the_watch_of_the_fuzzing_sees(tmp_path):
    """The hook that looks for code and writing is not blind."""
    acts = [
        lambda: pickle.loads(pickle.dumps(Booby(tmp_path / "trace"))),  # noqa: S301
        lambda: (tmp_path / "a").write_text("a"),
        lambda: os.system("true"),
        lambda: exec("1"),
        lambda: os.open(tmp_path / "b", os.O_CREAT | os.O_WRONLY),
    ]
    for act in acts:
        fuzz.WATCH.seen.clear()
        fuzz.WATCH.on = True
        with contextlib.suppress(OSError):
            act()
        fuzz.WATCH.on = False
        assert fuzz.WATCH.seen


def test_the_promises_name_their_tests():
    text = (ROOT / "SECURITY.md").read_text()
    assert "tests/fuzz.py" in text
    assert "docs/errors.md" in text


@pytest.mark.parametrize("forged", [["up", ["down"]], ["up", 1], ["up"], "up", [{}, {}]])
def test_labels_that_are_no_labels_are_those_of_the_columns(forged):
    """What a classifier notes of the types of labels may be forged; the texts are checked."""
    x = np.linspace(-1.0, 1.0, 60)[:, None]
    kernel = kernels.Gaussian(0.5)
    fit = JointClassifier(kernel_x=kernel, kernel_y=kernels.Categorical(0.5), max_rank=9)
    model = fit.fit(x, np.where(x[:, 0] > 0.0, "up", "down"), scheduler="synchronous").model_
    expected = model.predict(x).tolist()
    model.about["classes"] = forged
    assert model.predict(x).tolist() == expected


def test_an_array_that_holds_others_is_no_array(tmp_path):
    """Its chunks would be missing, and missing chunks are zeros."""
    store = write_store(tmp_path / "s", np.ones((300, 2)), np.zeros((300, 1)))
    root, inner = store / "zarr.json", store / "row_sample" / "y" / "zarr.json"
    both = root.read_bytes(), inner.read_bytes()
    root.write_bytes(both[1]), inner.write_bytes(both[0])
    with pytest.raises(
        StoreError, match=r"an array, but holds others \(chunk_checksums, row_sample, x, y\)"
    ):
        open_sample(store)
    (store / "again").symlink_to("again")  # a link to itself is no array
    with pytest.raises(StoreError, match=r"an array, but holds others \(chunk_checksums, "):
        open_sample(store)
    (store / "again").unlink()
    root.write_bytes(both[0]), inner.write_bytes(both[1])
    assert open_sample(store).n_rows == 300
    assert open_sample(str(store / "x")).n_rows == 300


def test_a_sparse_model_tells_both_numbers_of_candidates():
    x = np.linspace(-1.0, 1.0, 60)[:, None]
    fit = SparseEmbedding(kernel_x=kernels.Gaussian(0.5), kernel_y=kernels.Gaussian(0.5))
    state = fit.fit(x, np.sin(x), scheduler="synchronous").model_.to_state()
    state.description["about"]["candidates"].pop()
    with pytest.raises(StoreError, match="description of its fit is damaged"):
        SparseModel.from_state(state)


def test_held_out_errors_of_a_classifier_are_a_table():
    x = np.linspace(-1.0, 1.0, 60)[:, None]
    fit = EmbeddingClassifier(kernel_x=kernels.Gaussian(0.5), reg=1e-3, max_rank=9)
    model = fit.fit(x, np.where(x[:, 0] > 0.0, "up", "down"), scheduler="synchronous").model_
    model._validate()
    with pytest.raises(DataError, match="the held-out errors do not fit"):  # as reading does
        replace(model, about=model.about | {"held_out": 0.5})._validate()
