"""`logitmix export`: a run's best checkpoint -> serving directory."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from logitmix.common.mappings import counted
from logitmix.common.storage import fetch_run, path_of
from logitmix.launch.processes import is_main
from logitmix.trainer.commands.options import JSONOption, OverwriteOption, ProcessesOption, RunPlace, importing
from logitmix.trainer.commands.words import parse, parts

if TYPE_CHECKING:
    from logitmix.trainer.export.catalog import Catalog


@dataclass(frozen=True)
class Arguments(OverwriteOption, JSONOption, ProcessesOption):
    """Write the best checkpoint of a run as a serving directory."""

    run: RunPlace
    """Run directory; its refit is taken if there is one."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Serving directory to write."""
    checkpoint: Literal["best", "last"] = "best"
    """Which checkpoint: the best on validation, or the last."""
    delta_from: str = ""
    """Earlier export: write what it lacks, with the deltas that lie beside DIR, instead of a whole export."""
    item_cache: bool = True
    """Store the item tower's outputs. Otherwise store the items' rows and features, which take fewer bytes but pass
    through the tower for each request."""
    precision: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """How they are stored. bf16 and fp16 halve them; int8 is for the components of mol. Where fp16 cannot hold them,
    bf16 is taken."""
    filterable: str = ""
    """Columns of the items that requests can filter by, separated by commas: price,category,in_stock. The dataset's
    features with one value for each item, or columns of --items; actions, how many there are of the item in the
    dataset; and new, whether the first of them is in its last week."""
    items: str = ""
    """Table of the catalog (CSV, JSON lines or Parquet), whose ids are in its column item or its first one: with these
    columns, new items, and other features and titles of known ones, as for update-items."""
    only: bool = False
    """Leave out the items that are not in the table; histories may hold them."""
    faiss: bool = False
    """Also write the items' vectors as flat faiss indexes."""
    vectors: bool = False
    """Also write them as Parquet, for engines that load their own."""
    onnx: bool = False
    """Also write the query tower as ONNX."""
    programs: bool = False
    """Also write the towers and the cascade as programs of torch.export and AOTInductor."""

    @property
    def catalog(self) -> "Catalog | None":
        from logitmix.trainer.export.catalog import Catalog

        return Catalog(self.items, only=self.only) if self.items or self.only else None


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "export", words)
    arguments.start_ranks("export", words)
    if arguments.delta_from:
        return _delta(arguments)
    with importing():
        from logitmix.trainer.export.export import EXTRAS, Extra, export

    extras: list[Extra] = [name for name in EXTRAS if getattr(arguments, name, False)]
    manifest = export(
        fetch_run(arguments.run),
        path_of(arguments.out),
        arguments.overwrite,
        arguments.checkpoint,
        arguments.item_cache,
        arguments.precision,
        extras,
        arguments.keep,
        parts("--filterable", arguments.filterable),
        arguments.catalog,
    )
    said = f"{arguments.out}: {counted(manifest['num_items'], 'item')}, step {manifest['step']} of {arguments.run}"
    if manifest["precision"] != arguments.precision:
        said += f"\n{arguments.precision} cannot hold the items' sides: they are stored in {manifest['precision']}"
    if is_main():
        arguments.tell(manifest, said)


def _delta(arguments: Arguments) -> None:
    with importing():
        from logitmix.trainer.export.delta import export_delta

    taken = ("json", "processes", "run", "out", "checkpoint", "delta_from", "items", "only")
    for of in fields(arguments):
        if of.name not in taken and getattr(arguments, of.name) != of.default:
            flag = f"--{'no-' * (of.default is True)}{of.name.replace('_', '-')}"
            raise ValueError(
                f"{flag} has no place beside --delta-from: a delta has the item cache and columns of the earlier export"
            )
    content = export_delta(
        fetch_run(arguments.run),
        path_of(arguments.delta_from),
        path_of(arguments.out),
        arguments.checkpoint,
        arguments.catalog,
    )
    if is_main():
        of_both = content["files"], content["manifest"]["files"]
        size, whole = (sum(of["bytes"] for of in files.values()) for files in of_both)
        arguments.tell(
            content,
            f"{arguments.out}: delta {content['number']} of {size:,} bytes, step {content['manifest']['step']} of "
            f"{arguments.run}; the whole export has {whole:,}",
        )
