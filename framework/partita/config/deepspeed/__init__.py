"""Configs that were written for DeepSpeed: read, translated into ours by tables of rules, and reported key by key.

    hjson.py      JSON with comments and bare words          reading.py  files, YAML, base64
    accelerate.py Accelerate's YAML around a config          rules.py    what a rule is
    table_*.py    the rules                                  training.py optimizers and schedulers, by type
    combine.py    keys that decide together                  walk.py     carries the rules out
    report.py     what became of each key                    apply.py    into the plain config

The rules follow DeepSpeed 0.19 (runtime/config.py and its sections) and the versions before it.
"""
