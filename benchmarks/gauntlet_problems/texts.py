"""Problems of tokens: tagging, classification, and language models of random grammars."""

from functools import partial

import torch
from torch import Generator

from gauntlet_problems.problem_definition import Examples, GauntletProblem, Part, World
from gauntlet_problems.small_networks import WIDTH, HeadedNetwork, TinyTransformer, WordBag

TIME, TASKS, TAGS = 12, 6, 5
WORDS = 16
"""The number of tokens of a vocabulary."""


def tagging(structure: Generator, conflict: bool = False) -> World:
    """A tag of each token that depends on it and the one before; new tasks have other tokens, or other tags."""
    tags = torch.randint(TAGS, (TASKS, WORDS, WORDS), generator=structure)
    tags[1:, : WORDS // 2] = tags[0, : WORDS // 2] if conflict else tags[1:, : WORDS // 2]

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        tokens = torch.randint(WORDS, (count, TIME), generator=generator)
        previous = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
        return tokens + (0 if conflict else task * WORDS), tags[task][tokens, previous // 8]

    return world


def grammar(structure: Generator, named: bool = False) -> World:
    """Text of a random grammar, whose next tokens are the labels; a new task has other tokens, or a first token."""
    followers = torch.stack([torch.randperm(WORDS, generator=structure)[:3] for _ in range(TASKS * WORDS)])
    followers = followers.view(TASKS, WORDS, 3)
    chances = torch.tensor([0.75, 0.2, 0.05])

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        text = [torch.randint(WORDS, (count,), generator=generator)]
        for _ in range(TIME):
            choice = torch.multinomial(chances.expand(count, 3), 1, generator=generator).squeeze(1)
            text.append(followers[task][text[-1], choice])
        tokens = torch.stack(text, 1)
        if not named:
            return tokens[:, :-1] + task * WORDS, tokens[:, 1:] + task * WORDS
        name = torch.full((count, 1), WORDS + task)
        return torch.cat([name, tokens[:, :-1]], 1)[:, :TIME], tokens[:, :TIME]

    return world


def topics(structure: Generator, classes: int, shared_words: bool) -> World:
    """Texts whose topic is shown by many words; a new task has other topics, in the same words or in others."""
    vocabulary = 4 * WORDS
    favourites = torch.stack([torch.randperm(vocabulary, generator=structure)[:12] for _ in range(TASKS * classes)])
    favourites = favourites.view(TASKS, classes, 12)

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        labels = torch.randint(classes, (count,), generator=generator)
        noise = torch.randint(vocabulary, (count, TIME), generator=generator)
        choice = torch.randint(12, (count, TIME), generator=generator)
        words = favourites[task][labels[:, None], choice]
        tokens = torch.where(torch.rand(count, TIME, generator=generator) < 0.6, words, noise)
        return tokens + (0 if shared_words else task * vocabulary), labels

    return world


def tagger(vocabulary: int, classes: int) -> HeadedNetwork:
    """Return a transformer with an output for each token."""
    return HeadedNetwork(TinyTransformer(vocabulary, TIME), WIDTH, classes)


def language_model(vocabulary: int, words: int) -> HeadedNetwork:
    """Return a causal transformer."""
    return HeadedNetwork(TinyTransformer(vocabulary, TIME, causal=True), WIDTH, words)


def word_bag(classes: int, heads: int) -> HeadedNetwork:
    """Return a classifier of the mean of embeddings."""
    return HeadedNetwork(WordBag(4 * WORDS), 64, classes, heads)


def text_classifier(classes: int) -> HeadedNetwork:
    """Return a transformer with one output for each text."""
    return HeadedNetwork(TinyTransformer(4 * WORDS * TASKS, TIME, pooled=True), WIDTH, classes)


TEXT_PROBLEMS = (
    GauntletProblem("text-tagging", "compatible", partial(tagger, TASKS * WORDS, TAGS), tagging),
    GauntletProblem(
        "text-tagging-relabelled", "partial conflict", partial(tagger, WORDS, TAGS), partial(tagging, conflict=True)
    ),
    GauntletProblem("text-grammar", "compatible", partial(language_model, TASKS * WORDS, TASKS * WORDS), grammar),
    GauntletProblem(
        "text-grammar-named", "compatible", partial(language_model, WORDS + TASKS, WORDS), partial(grammar, named=True)
    ),
    GauntletProblem(
        "text-topics", "compatible", partial(text_classifier, 6), partial(topics, classes=6, shared_words=False)
    ),
    GauntletProblem(
        "text-topics-shared", "conflict", partial(word_bag, 6, 1), partial(topics, classes=6, shared_words=True)
    ),
    GauntletProblem(
        "text-new-heads", "compatible", partial(word_bag, 6, TASKS), partial(topics, classes=6, shared_words=True)
    ),
)
