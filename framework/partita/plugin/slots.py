"""The slots that the core asks plug-ins to fill, and what each implementation must be. docs/hooks.md shows this table."""

from __future__ import annotations

# slot -> what `partita_provide(slot, name)` returns for it
SLOTS: dict[str, str] = {
    "model": "a function (config, vocab) -> torch.nn.Module, called under torch.device('meta')",
    "corpus": "a function (config, tokenizer, split) -> partita.data.corpus.Corpus; split is train or validation",
    "tokenizer": "a function (config) -> an object with encode, encode_all, decode, vocab_size, eos, special, fingerprint; its own "
    "attribute vocab_size(config), if any, tells a plan the size without building",
    "optimizer": "a function (config.optimizer) -> partita.state.optimizers.Rule",
    "lr_schedule": "a function (config.lr_schedule, steps) -> a function of the update (from 1) -> factor on optimizer.lr",
    "loss": "a function (logits, labels, *, label_smoothing, z_loss) -> (float32 sum, int64 count of labels that are not -100)",
    "kernel": "a function (operation) -> a function with the signature of that operation's reference in partita_kernels; asked for by kernels.replace",
    "executor": "a function (partita.train.step.StepContext) -> partita.train.step.Executor; the name is the plan's schedule",
    "collective": "a function (CollectiveContext) -> partita.runtime.collectives.Collectives; the name is the plan's collectives.provider",
    "tier": "a function (partita.state.tiers.TierRequest) -> partita.state.tiers.Tier; asked for by the places in the plan's tiers",
    "tracker": "nothing: a tracker is an observer, and its names are what tracker.name may be",
}


def is_own(slot: str) -> bool:
    """Whether a slot belongs to a plug-in (`moe.router`): only that plug-in's code asks for it, so the core doesn't know it."""
    return "." in slot
