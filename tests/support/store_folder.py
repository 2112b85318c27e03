"""What lies in the folder of a file store, for tests."""

__all__ = ["object_path", "used_bytes"]


def object_path(folder, key):
    """Where an object's file is."""
    return folder / "objects" / key.hex()[:2] / key.hex()


def used_bytes(folder):
    """What really lies in the folder, objects and temporary files."""
    files = [*folder.glob("objects/*/*"), *folder.glob("temporary/*")]
    return sum(file.stat().st_size for file in files)
