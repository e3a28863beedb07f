# The weekly job of a shop, without code: sh examples/weekly_shop.sh FOLDER [settings of train]
#
# Purchases are predicted, from views, carts and purchases; what is out of stock is not recommended. Last week's export
# is kept: logitmix rollback FOLDER/export. On one core, it takes 3 minutes (docs/results.md).
#
# It reads FOLDER/events.csv (user, item, timestamp, event) and FOLDER/catalog.csv (item, in_stock and features); without
# events.csv it generates a shop, and two items that came today. The next week, it begins anew with files that have
# grown; --append and train --continue would go on instead (docs/scale.md).
set -eu
folder=${1:?sh examples/weekly_shop.sh FOLDER}
shift

if [ -e "$folder/events.csv" ]; then
    logitmix prepare table --source "$folder/events.csv" --items "$folder/catalog.csv" --out "$folder/data" --overwrite
else
    logitmix prepare demo-shop --out "$folder/data" --overwrite
    printf 'item,title,category,price,in_stock\nnews-1,The first of today,category-48,20,yes\nnews-2,The second,category-15,30,no\n' \
        > "$folder/catalog.csv"
fi
rm -rf "$folder/run"  # last week's, of other data
logitmix train auto --data.path "$folder/data" --run "$folder/run" \
    --data.targets "event = purchase" --model.features all --train.epochs 12 "$@"
logitmix export "$folder/run" --out "$folder/export" --overwrite --keep 1 \
    --items "$folder/catalog.csv" --filterable in_stock
logitmix recommend "$folder/export" --data.path "$folder/data" --where "in_stock = yes" --out "$folder/recommended.parquet"
echo "Then: logitmix serve $folder/export"
