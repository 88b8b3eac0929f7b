"""A script of a user, which fits one case of the chaos test on a cluster with a checkpoint.

python tests/chaos_client.py CASE STORES ADDRESS CHECKPOINT OUT
"""

import sys
from pathlib import Path

from chaos_cases import fit
from distributed import Client

if __name__ == "__main__":
    case, stores, address, checkpoint, out = sys.argv[1:]
    with Client(address, set_as_default=False) as client:
        fit(case, Path(stores), scheduler=client, checkpoint=checkpoint).save(out)
