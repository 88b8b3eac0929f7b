"""Recipes for clusters: they refuse what cannot work, and their files fit published schemas."""

import copy
import json
import os
import re
import runpy
import shlex
import shutil
import ssl
import subprocess
import sys
import time
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
import zarr
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "cluster"
SLURM = CLUSTER / "slurm"
FOLDERS = sorted(path for path in CLUSTER.iterdir() if path.is_dir())
SCRIPTS = sorted([*CLUSTER.rglob("*.sh"), *CLUSTER.rglob("*.sbatch")])


def done(*command, **variables):
    """A command that has ended, as in a shell of its own without SLURM."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    outer["PATH"] = f"{Path(sys.executable).parent}:{outer['PATH']}:/usr/sbin"
    outer["PYTHONPATH"] = os.pathsep.join([str(ROOT), outer.get("PYTHONPATH", "")])
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**outer, **variables}
    )


def arrays(model):
    """Bytes of each array of a model."""
    members = zarr.open_group(str(model), mode="r").members(max_depth=None)
    return {name: a[...].tobytes() for name, a in members if isinstance(a, zarr.Array)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_folder_says_how_to_use_it(folder):
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 14
    for word in ("Start", "Size", "Look", "Resume", "Clean up"):
        assert f"- **{word}**: " in text, word
    for target in re.findall(r"\]\(([^):]+)\)", text):
        assert (folder / target).exists(), target
    for name in re.findall(r"\./([\w.]+\.sh)\b|\b(\w[\w-]*\.(?:sbatch|yaml|py))\b", text):
        assert "tls.yaml" in name or (folder / "".join(name)).exists(), name


def test_scripts_can_be_parsed():
    assert len(SCRIPTS) >= 7
    script = 'for file; do bash -n "$file" || exit 1; done'
    assert done("bash", "-c", script, "-", *SCRIPTS).stderr == ""


# SLURM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words", "variables", "message"),
    [
        ("fit.sbatch", "fit s --checkpoint run", {}, "job for SLURM: run `sbatch fit.sbatch"),
        ("array.sbatch", "fit s --checkpoint run", {}, "job for SLURM: run `sbatch array.sbatch"),
        ("fit.sbatch", "fit s", {"SLURM_JOB_ID": "1"}, "add --checkpoint DIR"),
        ("array.sbatch", "fit s", {"SLURM_JOB_ID": "1"}, "add --checkpoint DIR"),
        (
            "fit.sbatch",
            "fit s --checkpoint run --scheduler threads",
            {"SLURM_JOB_ID": "1"},
            "leave out --scheduler",
        ),
        ("fit.sbatch", "fit s --checkpoint=/nix/run", {"SLURM_JOB_ID": "1"}, "is missing"),
        (
            "array.sbatch",
            "fit s --checkpoint run",
            {
                "SLURM_JOB_ID": "1",
                "SLURM_ARRAY_JOB_ID": "1",
                "SLURM_ARRAY_TASK_ID": "3",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_MIN": "1",
                "SLURM_ARRAY_TASK_MAX": "5",
            },
            "the shares of an array of 3 jobs are --array=1-3",
        ),
    ],
)
def test_jobs_refuse_what_cannot_be_continued(name, words, variables, message):
    found = done("bash", SLURM / name, *words.split(), **variables)
    assert found.returncode == 2
    assert message in found.stderr
    assert found.stdout == ""


def test_both_jobs_end_alike():
    """From the start of the command on, but for their names."""
    ends = []
    for name, job in (("fit.sbatch", "SLURM_JOB_ID"), ("array.sbatch", "job")):
        text = (SLURM / name).read_text().partition("\nfit=$!\n")[2]
        ends.append(text.replace(name, "NAME").replace(f'requeue "${job}"', "requeue JOB"))
    assert ends[0] == ends[1] != ""


def submitted(folder, name, words, **variables):
    """Words that a job gives to cme-dask, and those of its steps, where neither does anything."""
    for program, text in (
        ("cme-dask", 'echo "$@" >command'),
        ("srun", 'echo "$@" >>steps; file=$(grep -o "[^ ]*\\.json" <<<"$@") || exit 0\n'
                 """[ -s "$file" ] || echo '{"address": "tcp://a:1"}' >"$file" """),
    ):  # fmt: skip
        (folder / program).write_text(f"#!/bin/bash\n{text}\n")
        (folder / program).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SLURM_NNODES": "2", "PATH": path}
    line = shlex.join(["bash", str(SLURM / name), *words.split()])
    found = done("bash", "-c", f"cd {folder} && {line}", **slurm | variables)
    assert found.returncode == 0, found.stderr
    steps = folder / "steps"
    return (folder / "command").read_text().split(), steps.read_text() if steps.exists() else ""


@pytest.mark.parametrize(
    ("variables", "array", "worker"),
    [
        ({}, 1843, 1843),
        ({"SLURM_CPUS_PER_TASK": "4", "SLURM_MEM_PER_CPU": "1000"}, 3600, 3600),
        # As with --mem=64G, which all tasks of a node share.
        ({"SLURM_MEM_PER_NODE": "65536", "SLURM_TASKS_PER_NODE": "4,3"}, 58982, 14745),
        ({"SLURM_MEM_PER_NODE": "65536", "SLURM_TASKS_PER_NODE": "2,3(x2)"}, 58982, 19660),
    ],
)
def test_workers_use_the_memory_of_their_job(tmp_path, variables, array, worker):
    words = "fit rows.zarr --checkpoint run"
    command, _ = submitted(tmp_path, "array.sbatch", words, **variables)
    cores = variables.get("SLURM_CPUS_PER_TASK", "1")
    assert command[:5] == ["fit", "--workers", cores, "--memory-limit", f"{array}MiB"]
    _, steps = submitted(tmp_path, "fit.sbatch", words, **variables)
    assert f"--memory-limit {worker}MiB " in steps


def test_options_of_a_command_take_precedence_over_those_of_its_job(tmp_path):
    words = "fit rows.zarr --out m --checkpoint run --workers 3 --memory-limit 5GiB"
    command, _ = submitted(tmp_path, "array.sbatch", words)
    options = parses(["cme-dask", *command])
    assert options["workers"] == 3
    assert options["memory_limit"] == parses(["cme-dask", *words.split()])["memory_limit"]


SUBMITTED = """
set -e
KERNELS="--kernel-x gaussian:1 --kernel-y gaussian:1"
fit() { echo fit rows.zarr $KERNELS --out $1.model --checkpoint $1.run; }
cme-dask sample rows.zarr --rows 4e5
cme-dask $(fit expected)
JOB=$(sbatch --parsable --ntasks=2 --cpus-per-task=1 --time=9 fit.sbatch $(fit requeued))
until [ -d requeued.run ]; do sleep 0.2; done
scontrol requeue $JOB
SHARES=$(sbatch --parsable --array=1-2 --cpus-per-task=1 --time=9 array.sbatch $(fit array))
sbatch --wait --dependency=afterok:$SHARES --cpus-per-task=1 array.sbatch $(fit array)
until [ -d requeued.model ]; do sleep 0.5; done
if python -c "import dask_jobqueue" 2>/dev/null; then
    python jobqueue.py rows.zarr --out jobqueue.model --checkpoint jobqueue.run --length-scale 1 \
        --jobs 2 --cores 1 --memory 2GB --walltime 00:09:00
fi
"""


@pytest.mark.slow
def test_slurm_gives_the_same_bits(tmp_path):
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("SLURM is not installed")
    for name in ("fit.sbatch", "array.sbatch", "jobqueue.py"):
        (tmp_path / name).symlink_to(SLURM / name)
    found = done("bash", "-c", f"cd {tmp_path} && exec {SLURM}/one_node.sh bash -c '{SUBMITTED}'")
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert found.returncode == 0, found.stdout + found.stderr + logs
    expected = arrays(tmp_path / "expected.model")
    models = sorted(path.stem for path in tmp_path.glob("*.model"))
    assert {"array", "requeued"} <= set(models)
    for name in models:
        assert arrays(tmp_path / f"{name}.model") == expected, name


# Containers -------------------------------------------------------------------------------------


def test_compose_file_fits_the_published_schema():
    validators = pytest.importorskip("jsonschema")
    pytest.importorskip("check_jsonschema")
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    composition = yaml.safe_load((CLUSTER / "container" / "compose.yaml").read_text())
    check = validators.Draft202012Validator(yaml.safe_load(schema.read_text()))
    assert list(check.iter_errors(composition)) == []
    for damage in ({"services": {"fit": {"comand": "x"}}}, {"services": [1]}, {"service": {}}):
        assert not check.is_valid({**composition, **damage})


def test_the_store_of_the_composition_can_be_replaced():
    """By variables alone; without the services of the sample, the file is as the README has it."""
    composition = yaml.safe_load((CLUSTER / "container" / "compose.yaml").read_text())
    for name, value in composition["x-cme"]["environment"].items():
        assert value.startswith(f"${{{name}:-"), value
    services = composition["services"]
    for name in ("objects", "rows"):
        del services[name]
    others = {key: sorted(service.get("depends_on", ())) for key, service in services.items()}
    assert others == {"scheduler": [], "worker": ["scheduler"], "fit": ["rows", "scheduler"]}
    readme = (CLUSTER / "container" / "README.md").read_text()
    assert "`rows` from `depends_on` of `fit`" in readme


def test_folders_of_plain_processes_may_hold_spaces(tmp_path, monkeypatch):
    monkeypatch.delenv("FSSPEC_S3_ENDPOINT_URL", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    recipes = tmp_path / "my recipes"
    recipes.mkdir()
    for name in ("run_plain.py", "compose.yaml"):
        shutil.copy(CLUSTER / "container" / name, recipes)
    plain = runpy.run_path(str(recipes / "run_plain.py"))
    folder = tmp_path / "my rows"
    composition = plain["Composition"](recipes / "compose.yaml", folder, "5e4", (0.01, 0.0))
    services, ports = composition.services, composition.ports
    fit = parses(services["fit"]["command"])
    assert fit["out"] == folder / "rows.model"
    assert fit["scheduler"] == f"tcp://127.0.0.1:{ports[8786]}"
    rows = ["python", str(recipes / "fill_bucket.py"), "--rows", "5e4"]
    assert services["rows"]["command"][:4] == rows
    assert services["objects"]["command"][1] == str(recipes / "far_objects.py")
    endpoint = composition.environment("fit")["FSSPEC_S3_ENDPOINT_URL"]
    assert endpoint == f"http://127.0.0.1:{ports[9000]}"
    scheduler = parses(services["scheduler"]["command"])
    assert (scheduler["host"], scheduler["port"]) == ("127.0.0.1", str(ports[8786]))
    assert scheduler["dashboard_address"] == f"127.0.0.1:{ports[8787]}"
    assert f"('localhost', {ports[8786]})" in services["scheduler"]["healthcheck"]["test"][3]
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", "http://objects:9000/data/")
    composition = plain["Composition"](recipes / "compose.yaml", folder, "5e4", (0.0, 0.0))
    endpoint = composition.environment("fit")["FSSPEC_S3_ENDPOINT_URL"]
    assert endpoint == "http://objects:9000/data/"


def test_image_is_pinned_and_has_no_root():
    text = (CLUSTER / "container" / "Dockerfile").read_text()
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", image) for image in images)
    assert text.rindex("USER 1000") > text.rindex("RUN ")
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split())
    lines = (CLUSTER / "container" / "requirements.txt").read_text().split()
    pinned = {}
    for line in map(Requirement, lines):
        (exact,) = line.specifier
        assert exact.operator == "=="
        pinned[line.name] = exact.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["remote"]]:
        needed = Requirement(text)
        assert pinned[needed.name] in needed.specifier, text


@pytest.mark.slow
def test_composition_as_plain_processes(tmp_path):
    pytest.importorskip("moto")
    # From a store that is far away and busy, and from one that is not: that fit finds its model.
    for far in (["--delay", "0.01", "--failing", "0.05"], []):
        script = CLUSTER / "container" / "run_plain.py"
        found = done(sys.executable, script, tmp_path, "--rows", "5e4", *far)
        assert found.returncode == 0, found.stdout + found.stderr
    assert "busy: 3 of" in (tmp_path / "objects.log").read_text()
    local = ["rows.zarr", "--out", "local.model", "--kernel", "median"]
    line = shlex.join(["cme-dask", "fit", *local])
    found = done("bash", "-c", f"cd {tmp_path} && cme-dask sample rows.zarr --rows 5e4 && {line}")
    assert found.returncode == 0, found.stderr
    assert arrays(tmp_path / "rows.model") == arrays(tmp_path / "local.model")


# Kubernetes -------------------------------------------------------------------------------------

VERSION = "1.34"


def documents(name):
    return list(yaml.safe_load_all((CLUSTER / "kubernetes" / name).read_text()))


def kubernetes_definitions(kubernetes):
    """Definitions of a version of Kubernetes, where unknown keys are refused."""
    folder = files(kubernetes) / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"
    return json.loads((folder / "_definitions.json").read_text())


@pytest.mark.parametrize("name", ["storage.yaml", "fit.yaml"])
def test_manifests_fit_the_schemas_of_kubernetes(name):
    kubernetes = pytest.importorskip("kubernetes_validate")
    for manifest in documents(name):
        kubernetes.validate(manifest, VERSION, strict=True)
        with pytest.raises(kubernetes.ValidationError):
            kubernetes.validate({**manifest, "specs": {}}, VERSION, strict=True)


def strict(schema):
    """The same schema where objects with known properties have no others."""
    if isinstance(schema, dict):
        result = {key: strict(value) for key, value in schema.items()}
        if schema.get("type") == "object" and "properties" in schema:
            result["additionalProperties"] = False
        return result
    return schema


def test_resources_of_the_operator_fit_its_schemas():
    kubernetes = pytest.importorskip("kubernetes_validate")
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT202012

    operator = strict(yaml.safe_load((ROOT / "tests" / "dask_operator.yaml").read_text()))
    common = {"apiVersion": {"const": "kubernetes.dask.org/v1"}, "kind": {}, "metadata": {}}
    for kind in ("DaskCluster", "DaskAutoscaler"):
        operator["definitions"][kind]["properties"].update(common)
    registry = Registry().with_resources(
        [
            ("operator", Resource(operator, DRAFT202012)),
            ("kubernetes", Resource(kubernetes_definitions(kubernetes), DRAFT202012)),
        ]
    )

    def check(manifest):
        schema = {"$ref": f"operator#/definitions/{manifest['kind']}"}
        return Draft202012Validator(schema, registry=registry).is_valid(manifest)

    (cluster,), (autoscaler,) = documents("cluster.yaml"), documents("autoscaler.yaml")
    assert check(cluster)
    assert check(autoscaler)
    broken = copy.deepcopy(cluster)
    broken["spec"]["worker"]["spec"]["containers"][0]["imag"] = "x"
    assert not check(broken)
    broken = copy.deepcopy(cluster)
    broken["spec"]["workers"] = {}
    assert not check(broken)
    assert not check({**autoscaler, "spec": {"cluster": "cme", "minimum": 1}})


def test_manifests_belong_together():
    (cluster,), (autoscaler,), (job,) = map(
        documents, ("cluster.yaml", "autoscaler.yaml", "fit.yaml")
    )
    name = cluster["metadata"]["name"]
    assert autoscaler["spec"]["cluster"] == name
    assert cluster["spec"]["scheduler"]["service"]["selector"]["dask.org/cluster-name"] == name
    stored = {manifest["metadata"]["name"] for manifest in documents("storage.yaml")}
    pods = [cluster["spec"][part]["spec"] for part in ("worker", "scheduler")]
    pods.append(job["spec"]["template"]["spec"])
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["envFrom"][0]["secretRef"]["name"] in stored
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] in stored
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    (fit,) = pods[2]["containers"]
    assert f"tcp://{name}-scheduler:8786" in fit["args"]
    parses(fit["args"])
    values = yaml.safe_load((CLUSTER / "kubernetes" / "operator-values.yaml").read_text())
    assert values["rbac"]["cluster"] is True


def parses(line):
    """Whether a command of the project, or of Dask, takes these words."""
    from distributed.cli import dask_scheduler, dask_ssh, dask_worker

    from cme_dask.cli import cli

    name, command, *rest = line
    commands = {
        "scheduler": dask_scheduler.main,
        "worker": dask_worker.main,
        "ssh": dask_ssh.main,
    }
    found = cli.commands[command] if name == "cme-dask" else commands[command]
    with found.make_context(command, rest, resilient_parsing=False) as context:
        return context.params


def test_commands_of_the_compositions_are_those_of_dask():
    (cluster,) = documents("cluster.yaml")
    for part in ("worker", "scheduler"):
        (container,) = cluster["spec"][part]["spec"]["containers"]
        parses(container["args"])
    services = yaml.safe_load((CLUSTER / "container" / "compose.yaml").read_text())["services"]
    for name in ("scheduler", "worker", "fit"):
        parses(shlex.split(services[name]["command"]))


# TLS, GPU, MPI, SSH -----------------------------------------------------------------------------


def test_certificates_encrypt_a_cluster_that_refuses_others(tmp_path):
    from distributed import Client, LocalCluster
    from distributed.security import Security

    script = CLUSTER / "tls" / "make_certificates.sh"
    for folder in ("ours", "foreign"):
        made = done("bash", script, tmp_path / folder, "ada")
        assert made.returncode == 0, made.stderr
    before = (tmp_path / "ours" / "ada.pem").read_bytes()
    assert done("bash", script, tmp_path / "ours").returncode == 0
    assert (tmp_path / "ours" / "ada.pem").read_bytes() == before
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "ours").glob("*.key"))
    assert done("bash", script, tmp_path / "ours", "../out").returncode == 2

    def security(folder, client="client"):
        tls = yaml.safe_load((tmp_path / folder / "tls.yaml").read_text())["distributed"]["comm"]
        roles = {
            f"tls_{role}_{part}": tls["tls"][role][part]
            for role in ("scheduler", "worker", "client")
            for part in ("cert", "key")
        }
        own = {f"tls_client_{p}": str(tmp_path / folder / f"{client}.{e}") for p, e in
               (("cert", "pem"), ("key", "key"))}  # fmt: skip
        return Security(
            require_encryption=tls["require-encryption"],
            tls_ca_file=tls["tls"]["ca-file"],
            **roles | own,
        )

    with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        protocol="tls",
        host="127.0.0.1",
        security=security("ours"),
    ) as cluster:
        address = cluster.scheduler_address
        assert address.startswith("tls://")
        with Client(address, security=security("ours", "ada")) as client:
            assert client.submit(sum, [1, 2]).result() == 3
        with pytest.raises(OSError, match="TLS certificate does not match"):
            Client(address, security=security("foreign"), timeout=5)
        with pytest.raises(OSError, match=r"[Tt]imed out|closed"):
            Client(address.replace("tls", "tcp"), timeout=0.5)


def sign_expired(folder, name):
    """Replace a certificate by one of the same name and authority that ended yesterday."""
    authority = "" if name == "authority" else "-CA authority.pem -CAkey authority.key"
    line = (
        f"cd {folder} && openssl req -new -key {name}.key -subj '/CN={name}' | openssl x509 -req "
        f"{authority or '-signkey authority.key'} -days -1 -out {name}.pem"
    )
    assert done("bash", "-c", line).returncode == 0


def ends(folder, *names):
    """When certificates expire, in seconds since 1970; all must be those of the authority."""
    pems = [folder / f"{name}.pem" for name in names]
    verified = done("openssl", "verify", "-CAfile", folder / "authority.pem", *pems)
    assert verified.returncode == 0, verified.stderr
    dates = [done("openssl", "x509", "-in", pem, "-noout", "-enddate").stdout for pem in pems]
    return [ssl.cert_time_to_seconds(date.strip().partition("=")[2]) for date in dates]


def test_expired_certificates_are_replaced_and_none_outlives_the_authority(tmp_path):
    script = CLUSTER / "tls" / "make_certificates.sh"
    names = ("authority", "scheduler", "worker", "client")
    (tmp_path / "authority.key").touch()  # of a first call that was cut off
    made = done("bash", script, tmp_path, DAYS="30")
    assert made.returncode == 0, made.stderr
    authority, *others = ends(tmp_path, *names)
    assert authority - time.time() == pytest.approx(31 * 86400, abs=600)
    assert max(others) - time.time() == pytest.approx(30 * 86400, abs=600)

    before = {name: (tmp_path / f"{name}.pem").read_bytes() for name in names}
    sign_expired(tmp_path, "client")
    assert done("bash", script, tmp_path, "ada").returncode == 0  # for 365 days
    authority, *others = ends(tmp_path, *names, "ada")
    assert max(others) <= authority
    after = {name: (tmp_path / f"{name}.pem").read_bytes() for name in names}
    assert {name for name in names if after[name] != before[name]} == {"client"}

    sign_expired(tmp_path, "authority")
    assert done("bash", script, tmp_path, "ada").returncode == 0
    assert min(ends(tmp_path, *names, "ada")) > time.time() + 364 * 86400
    refused = done("bash", script, tmp_path, DAYS="0")
    assert (refused.returncode, refused.stderr) == (2, "DAYS must be a number of at least 1: 0\n")


def long_options(path, program):
    """Options of a program in a script."""
    text = path.read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"{program}\b([^\n]*)", "\n".join(
        each for each in text.splitlines() if not each.startswith("#")))  # fmt: skip
    return set(re.findall(r"--[a-z-]+", line))


@pytest.mark.parametrize(
    ("script", "program", "module"),
    [
        ("ssh/start.sh", "dask ssh", "distributed.cli.dask_ssh"),
        ("mpi/job.sh", "dask-mpi", "dask_mpi.cli"),
        ("gpu/workers.sh", "dask cuda worker", "dask_cuda.cli"),
    ],
)
def test_scripts_use_options_that_exist(script, program, module):
    main = pytest.importorskip(module)
    command = main.worker if "cuda" in module else main.main
    known = {option for each in command.params for option in each.opts + each.secondary_opts}
    found = long_options(CLUSTER / script, program)
    assert found
    assert found <= known
    usage = done("bash", CLUSTER / script)
    assert (usage.returncode, usage.stderr.partition(":")[0]) == (2, "usage")
