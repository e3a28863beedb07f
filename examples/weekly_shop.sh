# The weekly job of a shop, without code: sh examples/weekly_shop.sh FOLDER [settings of train]
#
# Purchases are predicted, from views, carts and purchases; what is out of stock is not recommended. Last week's export
# is kept: logitmix rollback FOLDER/export. On one core, 12 epochs take 4 minutes (benchmarks/notes/shop.md).
#
# demo-shop is generated. Of a shop's own files:
#     logitmix prepare table --source events/ --items catalog.csv --out FOLDER/data
# The next week, --append and train --continue go on instead (docs/scale.md).
set -eu
folder=$1
shift

logitmix prepare demo-shop --out "$folder/data" --overwrite
logitmix train auto --data.path "$folder/data" --run "$folder/run" \
    --data.targets "event = purchase" --model.features all --train.epochs 12 "$@"
logitmix export "$folder/run" --out "$folder/export" --overwrite --keep 1
logitmix recommend "$folder/export" --data.path "$folder/data" --where "in_stock = yes" --out "$folder/recommended.parquet"
echo "Then: logitmix serve $folder/export"
