# A shop's weekly job with RecTools, for shop.py: python shop_rectools.py FOLDER K ease|sasrec [LOSS]
import sys

import pandas as pd
from rectools.dataset import Dataset
from rectools.models import EASEModel, SASRecModel

folder, k, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
events, catalog = pd.read_csv(f"{folder}/events.csv"), pd.read_csv(f"{folder}/catalog.csv")
events = events.rename(columns={"user": "user_id", "item": "item_id"})
events["datetime"] = pd.to_datetime(events["timestamp"], unit="s")
if kind == "ease":
    events["weight"], model = 1.0, EASEModel()
else:
    # Only actions with weight are targets. One customer in a hundred has more than 48 actions.
    events["weight"] = (events["event"] == "purchase").astype(float)
    sizes = {"n_blocks": 2, "n_heads": 1, "n_factors": 64, "session_max_len": 50, "batch_size": 64}
    model = SASRecModel(**sizes, loss=sys.argv[4], n_negatives=64, epochs=3, recommend_torch_device="cpu")
dataset = Dataset.construct(events)
model.fit(dataset)
in_stock = catalog["item"][(catalog["in_stock"] == "yes") & catalog["item"].isin(events["item_id"])]
found = model.recommend(events["user_id"].unique(), dataset, k, True, in_stock, on_unsupported_targets="ignore")
found.rename(columns={"user_id": "user", "item_id": "item"}).to_parquet(f"{folder}/recommended.parquet")
