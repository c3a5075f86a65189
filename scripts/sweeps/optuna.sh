#!/bin/sh
# A search with Optuna (TPE) for the lowest evaluation loss; each job starts its own ranks. Needs: pip install 'partita[sweep]'.
# More arguments are added: scripts/sweeps/optuna.sh hydra.sweeper.n_trials=50 model=llama
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" scripts/train.py -m hydra/sweeper=optuna hydra/sweeper/sampler=tpe \
    hydra.sweeper.sampler.seed=1 hydra.sweeper.direction=minimize hydra.sweeper.n_trials=20 hydra.sweeper.n_jobs=1 \
    'optimizer.lr=tag(log, interval(1e-4, 1e-2))' 'optimizer.weight_decay=choice(0.0, 0.1)' train.steps=100 "$@"
