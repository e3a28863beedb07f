"""Draws the two diagrams of architecture.md: `python docs/diagrams.py` writes system.svg and training_step.svg."""

from pathlib import Path

COLORS = {"data": "#e3f2e6", "train": "#dfeafa", "wire": "#fde9d0", "serve": "#eee4f7", "plain": "#f4f4f4"}
STYLE = (
    "text { font: 13px sans-serif; fill: #222; text-anchor: middle } .small { font-size: 11px; fill: #444 } "
    ".left { text-anchor: start; font-weight: bold } "
    ".beside { text-anchor: start } rect { stroke: #666 } line { stroke: #444; stroke-width: 1.4 }"
)


def box(x: int, y: int, width: int, height: int, color: str, title: str, *lines: str) -> str:
    middle = x + width // 2
    first = y + height // 2 + 5 - 8 * len(lines)
    texts = [f'<text x="{middle}" y="{first}">{title}</text>'] + [
        f'<text class="small" x="{middle}" y="{first + 16 * (n + 1)}">{line}</text>' for n, line in enumerate(lines)
    ]
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{COLORS[color]}"/>'
    return shape + "".join(texts)


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "", both: bool = False) -> str:
    start = ' marker-start="url(#head)"' if both else ""
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#head)"{start}/>'
    if not label:
        return line
    if x1 == x2:
        return line + f'<text class="small beside" x="{x1 + 8}" y="{(y1 + y2) // 2 + 4}">{label}</text>'
    return line + f'<text class="small" x="{(x1 + x2) // 2}" y="{y1 - 7}">{label}</text>'


def svg(width: int, height: int, title: str, *shapes: str) -> str:
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker>'
    )
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n<defs>{head}</defs>\n"
        f'<rect width="{width}" height="{height}" fill="#fff" style="stroke: none"/>\n{body}\n</svg>\n'
    )


def system() -> str:
    ranks = []
    for rank, y in enumerate((120, 250)):
        ranks += [
            box(210, y, 150, 90, "train", f"tables, rank {rank}", "a share of the rows,", "optimizer states"),
            arrow(360, y + 45, 470, y + 45, both=True),
            box(
                470,
                y,
                250,
                90,
                "train",
                f"tower, rank {rank}",
                "a replica: encoder, similarity,",
                "loss on a part of the batch",
            ),
        ]
    return svg(
        980,
        480,
        "From raw files to answers",
        box(20, 20, 120, 50, "plain", "raw files", "CSV, Parquet, …"),
        arrow(140, 45, 230, 45, "prepare"),
        '<text class="small" x="185" y="61">DuckDB</text><text class="small" x="185" y="75">or Spark</text>',
        box(230, 20, 170, 50, "data", "dataset directory", "Parquet, dataset.json"),
        arrow(400, 45, 490, 45),
        box(490, 20, 210, 50, "data", "batches", "a function of seed and step"),
        arrow(595, 70, 595, 120),
        *ranks,
        box(385, 145, 60, 170, "wire", "wire", "rows", "and", "gradients", "in FP8"),
        arrow(595, 210, 595, 250, "all-reduce", both=True),
        arrow(285, 340, 285, 395),
        arrow(595, 340, 350, 395),
        box(210, 395, 170, 60, "data", "run directory", "checkpoints by shard,", "metrics"),
        arrow(380, 425, 470, 425, "export"),
        box(470, 395, 190, 60, "serve", "export", "towers, items, index,", "vocabularies"),
        arrow(660, 425, 745, 425),
        box(745, 395, 225, 60, "serve", "Retriever", "stage 1 (h-indexer),", "stage 2 (MoL)"),
        arrow(857, 395, 857, 330),
        box(745, 270, 225, 60, "serve", "server or cluster", "HTTP workers on one machine,", "or shards on Ray Serve"),
        arrow(857, 270, 857, 210),
        box(745, 160, 225, 50, "plain", "answer", "items, titles, scores"),
    )


def training_step() -> str:
    lanes = {"thread": 20, "tower": 80, "rows": 140, "gradients": 200, "tables": 260}
    shapes = [f'<text class="left" x="10" y="{y + 28}">{name}</text>' for name, y in lanes.items()]
    shapes += [
        box(95, lanes["thread"], 560, 45, "data", "make batch t + 2"),
        box(95, lanes["rows"], 90, 45, "wire", "rows of t", "the last part"),
        box(190, lanes["rows"], 110, 45, "wire", "ids of t + 1"),
        box(190, lanes["tower"], 245, 45, "train", "forward and backward of t", "then all-reduce of dense gradients"),
        box(880, lanes["tower"], 120, 45, "train", "dense optimizer"),
        arrow(95, 325, 1000, 325),
        '<text class="small" x="547" y="343">one step of one rank, with comm.parts = 3</text>',
    ]
    for part in (1, 2, 3):
        x = 330 + 110 * part
        shapes += [
            box(x, lanes["gradients"], 105, 45, "wire", "gradients of t", f"part {part}"),
            box(x + 110, lanes["tables"], 105, 45, "train", f"update part {part}", "look up for t + 1"),
            box(x + 220, lanes["rows"], 105, 45, "wire", "rows of t + 1", f"part {part}"),
        ]
    return svg(1010, 355, "A training step", *shapes)


if __name__ == "__main__":
    for name, drawing in (("system", system()), ("training_step", training_step())):
        Path(__file__).with_name(f"{name}.svg").write_text(drawing, encoding="utf-8")
