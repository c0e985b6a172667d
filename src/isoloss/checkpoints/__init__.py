"""Any Hugging Face checkpoint, found, checked and opened safely: a folder, an adapter, a name on the hub, a module."""
