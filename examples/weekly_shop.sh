# The weekly job of a shop, without code: sh examples/weekly_shop.sh FOLDER [settings of train]
#
# Purchases are predicted, from views, carts and purchases; what is out of stock is not recommended. Last week's export
# is kept: logitmix rollback FOLDER/export. On one core, 12 epochs take 4 minutes (benchmarks/notes/shop.md).
#
# demo-shop is generated. Of a shop's own files:
#     logitmix prepare table --source events/ --items catalog.csv --out FOLDER/data
#     logitmix export FOLDER/run --out FOLDER/export --items catalog.csv --only --filterable in_stock
# The next week, --append and train --continue go on instead (docs/scale.md).
set -eu
folder=${1:?sh examples/weekly_shop.sh FOLDER}
shift

logitmix prepare demo-shop --out "$folder/data" --overwrite
logitmix train auto --data.path "$folder/data" --run "$folder/run" \
    --data.targets "event = purchase" --model.features all --train.epochs 12 "$@"
printf 'item,title,category,price,in_stock\nnews-1,The first of today,category-48,20,yes\nnews-2,The second,category-15,30,no\n' \
    > "$folder/news.csv"
logitmix export "$folder/run" --out "$folder/export" --overwrite --keep 1 \
    --items "$folder/news.csv" --filterable in_stock
logitmix recommend "$folder/export" --data.path "$folder/data" --where "in_stock = yes" --out "$folder/recommended.parquet"
echo "Then: logitmix serve $folder/export"
