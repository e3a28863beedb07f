from pathlib import Path


def files_in(folder: Path) -> dict[str, bytes]:
    """Their content by their paths in the folder; of hidden ones, too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
