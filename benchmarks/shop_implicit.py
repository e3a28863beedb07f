# A shop's weekly job with implicit, for shop.py: python shop_implicit.py FOLDER K als|bm25
import sys

import numpy as np
import pandas as pd
from implicit.als import AlternatingLeastSquares
from implicit.nearest_neighbours import BM25Recommender
from scipy.sparse import csr_matrix

folder, k, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
events, catalog = pd.read_csv(f"{folder}/events.csv"), pd.read_csv(f"{folder}/catalog.csv")
user, item = (events[name].astype("category").cat for name in ("user", "item"))
matrix = csr_matrix((np.ones(len(events), np.float32), (user.codes, item.codes)))
model = BM25Recommender(K=100) if kind == "bm25" else AlternatingLeastSquares(64, random_state=0)
model.fit(matrix)
missing = np.flatnonzero(item.categories.isin(catalog["item"][catalog["in_stock"] == "no"]))
items, scores = model.recommend(np.arange(matrix.shape[0]), matrix, N=k, filter_items=missing)
found = {"user": user.categories.repeat(k), "item": item.categories[items.ravel()], "score": scores.ravel()}
pd.DataFrame(found)[items.ravel() >= 0].to_parquet(f"{folder}/recommended.parquet")
