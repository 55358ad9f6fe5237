"""Megatron's older models, which it advises against; there is nothing here. See megatron.core."""
