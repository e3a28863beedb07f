"""A shop's own data, from a CSV file to recommendations: python examples/shop.py [FOLDER]

The file has 1,000 customers and 120 products in six aisles. A customer buys from two aisles, mostly from that of the
last purchase. Training takes less than half a minute on a core.
"""

import csv
import random
import sys
from pathlib import Path

from logitmix.trainer import api

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/shop")
if folder.exists():
    sys.exit(f"{folder} exists already; give another FOLDER")
folder.mkdir(parents=True)
aisles = ("tea", "bread", "cheese", "fruit", "soap", "paper")
draw = random.Random(0)

with (folder / "clicks.csv").open("w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["user", "item", "timestamp"])
    for customer in range(1000):
        own = draw.sample(aisles, 2)
        aisle = own[0]
        products = [f"{name}-{n}" for name in own for n in range(20)]
        for hour in range(12):
            aisle = aisle if draw.random() < 0.8 else draw.choice(own)
            bought = draw.choice([product for product in products if product.startswith(aisle)] or products)
            products.remove(bought)
            rows.writerow([f"customer-{customer}", bought, 1_700_000_000 + 3600 * hour])

api.prepare("table", source=str(folder / "clicks.csv"), out=str(folder / "data"))
metrics = api.train("auto", folder / "run", {"data.path": str(folder / "data"), "train.epochs": 15})
print(f"test HR@10 {metrics['hr@10']:.2f}")
api.export(folder / "run", folder / "export")
retriever = api.Retriever.load(folder / "export")
for row in retriever.rows(["tea-1", "soap-3", "soap-7"], k=5):
    print(row["rank"], row["id"], f"{row['score']:.2f}")
