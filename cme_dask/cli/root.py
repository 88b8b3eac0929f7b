"""The group of all commands."""

import click

from cme_dask import __version__
from cme_dask.cli.group import SentenceGroup
from cme_dask.cli.options import examples


@click.group(
    "cme",
    cls=SentenceGroup,
    invoke_without_command=True,
    epilog=examples(
        "cme-dask demo",
        "cme-dask ingest data/*.csv --out s.zarr --x TEMP,DEWP --y PM2.5",
        'cme-dask fit s.zarr --out m.zarr --event "PM2.5 > 75" --max-rank 300',
        'cme-dask expect m.zarr --given TEMP=20,DEWP=5 --of PM2.5 --of "PM2.5 > 75"',
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="cme-dask")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Learn joint and conditional distributions with kernels, out of core, on Dask."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command and exit: 0, 2 data or usage, 3 environment, 130 interrupted."""
    cli(prog_name="cme-dask")
