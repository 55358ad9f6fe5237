"""Hugging Face models: config.json, tensor names, safetensors folders, import and export."""
