"""Checkpoints of other programs: DeepSpeed (ZeRO 0 to 3), Hugging Face folders, nanoGPT files. Nothing in them is executed."""
