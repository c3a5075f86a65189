"""Schemas of the config nodes that the core owns. Plug-ins bring the schemas of theirs (hook `partita_config`).

Defaults live here, choices live in YAML (conf/partita_conf). After composition the whole tree is converted once to these plain
dataclasses; nothing past that door sees an OmegaConf object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"


@dataclass
class RunConfig:
    """Where a run writes and what it is called."""

    dir: str = "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S-%f}"  # folder of the run; the same folder again resumes it
    name: str | None = None  # shown in logs and in the tracker; default: the folder's name
    redo: bool = False  # in a sweep: run jobs again that are already finished


@dataclass
class LaunchConfig:
    """How ranks are started."""

    ranks: int | str = AUTO  # processes; auto: accelerators found, or on a CPU what the layout needs
    threads: int | str = AUTO  # compute threads of each rank; auto: cores / ranks
    timeout: float = 600.0  # seconds until a collective that a rank doesn't join is an error
    grace: float = 25.0  # seconds from a signal to the end of the run; a checkpoint is written within them
    restarts: int = 0  # times that a run whose rank is lost goes on by itself, with the ranks that are left; 0: it fails
    min_ranks: int = 1  # with fewer ranks it fails
    cooldown: float = 300.0  # seconds for which the place of a lost rank stays empty; then the run goes on with all ranks again
    log_level: str = "info"  # debug, info, warning, error


@dataclass
class PluginsConfig:
    """Which installed plug-ins stay out."""

    block: list[str] = field(default_factory=list)  # entry-point names that are never imported (read before composing)


@dataclass
class ModelConfig:
    """A model by name of the slot `model`. Sizes are counts; None means: derived by the model."""

    name: str = "gpt"  # gpt, llama, bert, hf, or one that a plug-in provides
    layers: int = 4  # blocks
    width: int = 256  # hidden size
    heads: int = 8  # attention heads; must divide width
    kv_heads: int | None = None  # key/value heads (Llama only); default: heads
    ffn: int | None = None  # inner size of the feed-forward; default: 4 x width (Llama: 8/3 x width, rounded up to 64)
    vocab: int | None = None  # entries; default: the tokenizer's
    context: int | None = None  # longest sequence; default: data.sequence
    tie_embeddings: bool = True  # output head shares the input embedding
    dropout: float = 0.0  # probability, on embeddings and on each residual branch
    init_std: float = 0.02  # standard deviation of the normal initial weights (GPT-2)
    rope_base: float = 10000.0  # base of rotary positions (Llama only)
    path: str | None = None  # hf: folder with config.json (and weights)
    weights: str = AUTO  # hf: auto (load where the folder has weights), load, random
    # for the model's provider, which checks them; hf: overrides of its config
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig:
    """A corpus by name of the slot `corpus`, cut into samples of `sequence` tokens."""

    name: str = "stdlib"  # stdlib, text, tokens, hf, sft, synthetic, or one that a plug-in provides
    path: str | None = None  # file, folder or glob (text, tokens, hf, sft)
    format: str = AUTO  # tokens: auto, megatron (.bin + .idx), raw (.bin of uint16/uint32)
    dtype: str = AUTO  # tokens, raw: auto (uint16 where vocab < 65536), uint16, uint32, int32
    column: str = "text"  # of rows: the one with text (hf: or token ids; sft: where messages stand, found by itself by default)
    template: str = AUTO  # sft: how conversations are written: auto (the tokenizer's, else chatml), chatml, or a Jinja file
    mask_prompt: bool = True  # sft: learn what the assistant says only
    tokenizer: str = "bytes"  # bytes, bpe (trained on the corpus), or a path to a tokenizer.json or folder
    vocab: int = 4096  # bpe: entries
    sequence: int = 128  # tokens of a sample
    pack: bool = False  # keep documents apart inside a sample (attention and positions restart at each document)
    validation: float = 0.05  # share of documents held out, by hash of their content
    mask: float = 0.15  # masked language models: share of tokens predicted (Devlin et al. 2018)
    shuffle: bool = True  # sample order is a permutation for each epoch that depends on seed and epoch only
    workers: int = 1  # threads that prepare the next batches
    cache: str | None = None  # folder for tokenized corpora; default: $XDG_CACHE_HOME/partita
    limit: int | None = None  # bytes of text used at most (stdlib, text); default: 4 MiB for stdlib, else all


@dataclass
class OptimizerGroup:
    """Settings of the parameters whose name matches `match` (shell patterns); the first group that fits wins."""

    match: list[str] = field(default_factory=list)
    lr_scale: float = 1.0  # factor on optimizer.lr
    weight_decay: float | None = None  # default: optimizer.weight_decay
    max_dims: int | None = None  # only parameters of at most this many dimensions (1: vectors and scalars); default: any
    optimizer: str | None = None  # update rule of these parameters; default: optimizer.name


@dataclass
class OptimizerConfig:
    """An update rule by name of the slot `optimizer`."""

    # adamw, adam, sgd, lion, adagrad, lamb, adafactor, muon, adamw8bit, torchao_adamw8bit, torchao_adamw4bit, or one that a plug-in provides
    name: str = "adamw"
    lr: float = 1e-3  # peak learning rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decay of the moments (Adam family)
    eps: float = 1e-8
    weight_decay: float = 0.1  # decoupled (AdamW), else added to the gradient
    momentum: float = 0.0  # SGD, Muon
    nesterov: bool = False  # SGD, Muon
    decay_1d: bool = False  # weight decay on vectors (biases, norms) too
    groups: list[OptimizerGroup] = field(default_factory=list)
    # for the rule's provider, which checks them; each must be one that a rule of this node takes
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class LrScheduleConfig:
    """Factor on the learning rate by name of the slot `lr_schedule`."""

    # constant, linear, cosine, wsd, inverse_sqrt; as DeepSpeed counts: warmup, warmup_decay, warmup_cosine, one_cycle, range_test
    name: str = "cosine"
    warmup: int | float = 0.05  # steps (int) or share of train.steps (float below 1), linear from 0
    minimum: float = 0.1  # factor at the end (linear, cosine, wsd)
    decay: int | float = 0.2  # wsd: length of the final decay, steps or share
    # for schedules that count as DeepSpeed's do (warmup, warmup_decay, ...), which check them
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainConfig:
    """The loop."""

    steps: int = 100  # optimizer updates
    global_batch: int | str = (
        16  # sequences of one update, over all ranks; auto: data ranks x micro_batch x parallel.microbatches
    )
    micro_batch: int | str = AUTO  # sequences of one forward pass on a rank; auto: the whole share of a rank, at most 8
    grad_clip: float = 1.0  # largest global gradient norm (L2); 0: no clipping
    loss: str = AUTO  # name of the slot `loss`; auto: the model's own
    label_smoothing: float = 0.0
    z_loss: float = 0.0  # weight of log(Z)^2 (PaLM, section 5)
    on_nonfinite: str = "stop"  # stop, skip (count and go on). With a dynamic loss scale, overflow always skips
    eval_every: int = 0  # steps between evaluations; 0: only at the end
    eval_batches: int = 0  # global batches of one evaluation; 0: the whole validation set
    eval_at_end: bool = True
    save_every: int | str = (
        0  # steps between checkpoints; 0: only at the end; auto: as mtbf and the cost of a save tell (Young 1974)
    )
    mtbf: float = 0.0  # mean seconds between failures of the whole run, for save_every=auto
    memory_every: int = 0  # steps between snapshots in the host's memory, from which a run that lost a rank goes on; 0: none
    memory_path: str = "/dev/shm"  # where they are under torchrun or Slurm; ranks that Partita starts need no folder
    save_at_end: bool = True
    async_save: bool = True  # write in the background
    save_optimizer: bool = True  # false: checkpoints hold no optimizer states; going on from them starts moments at zero
    save_frozen: bool = True  # false: parameters that aren't trained stay out; they must come from elsewhere when the run goes on
    keep: int = 2  # newest checkpoints kept
    keep_best: int = 0  # kept as well: this many with the lowest evaluation loss
    on_save_error: str = "stop"  # stop, warn (training goes on; `latest` stays where it was)
    log_every: int = 10  # steps between lines on the console (metrics.jsonl has every step)
    # count and time every message between ranks, by purpose: into the metrics, and as a table and a picture at the end
    communication_log: bool = False
    resume: str = AUTO  # auto (the newest checkpoint in run.dir, if any), never, or a path to a checkpoint
    resume_optimizer: bool = True  # false: take weights, step and schedule of a checkpoint; moments begin at zero
    resume_partial: bool = False  # load what the checkpoint has for this model and report the rest, which stays as initialised
    sample: int = 160  # tokens of the text generated at the end; 0: none
    sample_prompt: str = "def "
    peak_flops: float | None = None  # FLOP/s of one device in the compute dtype, for MFU; default: the table of known devices


@dataclass
class ClusterConfig:
    """The machine that a plan is made for. None means: what is found here."""

    name: str = AUTO
    nodes: int | None = None
    devices_per_node: int | None = None
    device: str | None = None  # cpu, a100, h100, h200, mi300x, ...: a row of the device table
    memory: float | None = None  # bytes of one device
    host_memory: float | None = None  # bytes of one node
    flops: float | None = None  # dense bf16 FLOP/s of one device
    intra_bandwidth: float | None = None  # bytes/s of one device inside a node, one direction, as collectives reach it
    inter_bandwidth: float | None = None  # bytes/s of one device between nodes, one direction, as collectives reach it
    intra_latency: float | None = None  # seconds of one hop inside a node
    inter_latency: float | None = None  # seconds of one hop between nodes
    memory_bandwidth: float | None = None  # bytes/s of one device's own memory
    host_bandwidth: float | None = None  # bytes/s between one device and the host's memory, one direction
    file_bandwidth: float | None = None  # bytes/s of one node's disk
    calibration: str = AUTO  # file of measured rates; auto: the user's (scripts/calibrate.py writes it); none: the tables alone


@dataclass
class KernelsConfig:
    """Hot operations: see docs/kernels.md."""

    # where the reference models' norms, gated units, rotary positions and loss run kernels instead of torch's operations:
    # auto (on accelerators), always, never
    layers: str = AUTO
    # tiles of matrix kernels on accelerators: default (the same for everyone), tuned (what was measured on such a device, where it was),
    # tune (measure what hasn't been, and keep it on disk)
    tiles: str = "default"
    # operation of partita_kernels -> name of the slot `kernel` that takes its place, e.g. +kernels.replace.glu=liger
    replace: dict[str, Any] = field(default_factory=dict)


# name of the node -> schema; the root gets one field for each, and one for each node of a plug-in
CORE_NODES: dict[str, type] = {
    "run": RunConfig,
    "launch": LaunchConfig,
    "plugins": PluginsConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "lr_schedule": LrScheduleConfig,
    "train": TrainConfig,
    "kernels": KernelsConfig,
    "cluster": ClusterConfig,
}
