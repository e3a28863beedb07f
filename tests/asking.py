"""Asking a Retriever where all requests have an answer."""

from collections.abc import Sequence
from dataclasses import asdict

from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Answer, Retriever, Row


def ranked_rows(answers: Sequence[Answer]) -> list[list[Row]]:
    """The items of each answer. ValueError that names the request, from 0, that has none."""
    for place, answer in enumerate(answers):
        if "error" in answer:
            raise ValueError(answer["error"].replace("the request", f"request {place}", 1))
    return [answer["items"] for answer in answers]


def answered(retriever: Retriever, requests: Sequence[Request], options: Options) -> list[list[Row]]:
    """The items for each request that does not say itself how it is answered."""
    return ranked_rows(retriever.ask(requests, asdict(options)))
