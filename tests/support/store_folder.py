"""The files in the folder of a file store."""

__all__ = ["object_path", "used_bytes"]


def object_path(folder, key):
    """Returns the path of an object's file."""
    return folder / "objects" / key.hex()[:2] / key.hex()


def used_bytes(folder):
    """Returns the size of all files in the folder: objects and temporary files."""
    files = [*folder.glob("objects/*/*"), *folder.glob("temporary/*")]
    return sum(file.stat().st_size for file in files)
