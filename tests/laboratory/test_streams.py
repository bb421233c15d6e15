"""Tests of streams: every cut puts every image into its task."""

import pytest
import torch

from mooring.errors import MooringError
from mooring_lab.streams import Source, Split, by_class, digits, permuted, rotated
from mooring_lab.streams.cuts import rotate


def unbalanced(classes=6):
    """Return a data set whose classes have 3, 4, 5, ... training and 1, 2, 3, ... test images, shuffled."""
    splits = []
    for least in (3, 1):
        labels = torch.cat([torch.full((least + label,), label) for label in range(classes)])
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(least))]
        images = torch.randint(256, (len(labels), 3, 4, 4), generator=torch.Generator().manual_seed(9)).to(torch.uint8)
        splits.append(Split(images, labels))
    return Source("unbalanced", *splits, tuple("abcdefghij"[:classes]))


@pytest.mark.parametrize("shuffle", [None, 0, 7])
@pytest.mark.parametrize("per_task", [1, 2, 3, 6])
def test_cut_by_class_puts_every_image_into_the_task_of_its_class(per_task, shuffle):
    source = unbalanced()
    stream = by_class(source, per_task, shuffle=shuffle)
    assert len(stream.tasks) == 6 // per_task
    assert sorted(c for task in stream.tasks for c in task.classes) == list(range(6))
    for original, split, kind in ((source.train, stream.train, "train"), (source.test, stream.test, "test")):
        seen = torch.cat([getattr(task, kind) for task in stream.tasks])
        assert sorted(seen.tolist()) == list(range(len(original)))
        assert torch.equal(split.images, original.images)
        for task in stream.tasks:
            for index in getattr(task, kind).tolist():
                assert task.classes[split.labels[index]] == original.labels[index]
    assert stream.outputs == per_task
    assert [stream.head(t) for t in range(len(stream.tasks))] == list(range(len(stream.tasks)))


def test_order_of_classes_depends_on_the_seed_alone():
    def order(shuffle):
        return [c for task in by_class(unbalanced(), 2, shuffle=shuffle).tasks for c in task.classes]

    assert order(None) == [0, 1, 2, 3, 4, 5]
    assert order(1) == order(1) != order(2)
    torch.manual_seed(5)
    assert order(1) == order(1)


def test_permuted_task_reorders_the_pixels_of_every_image_in_the_same_way():
    """Images whose pixels are numbered show the permutation."""
    source = unbalanced()
    numbered = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4).expand(len(source.train), 3, 4, 4).contiguous()
    stream = permuted(source, 3, seed=4)
    orders = permuted(Source("numbered", Split(numbered, source.train.labels), source.test, source.classes), 3, seed=4)
    assert stream.heads == "one"
    assert torch.equal(stream.train.images[stream.tasks[0].train], source.train.images)
    for task in (1, 2):
        order = orders.train.images[orders.tasks[task].train[0]][0].flatten().long()
        assert sorted(order.tolist()) == list(range(16)) != order.tolist()
        for original, permuted_split, kind in (
            (source.train, stream.train, "train"),
            (source.test, stream.test, "test"),
        ):
            indices = getattr(stream.tasks[task], kind)
            assert torch.equal(permuted_split.images[indices].flatten(2), original.images.flatten(2)[:, :, order])
            assert torch.equal(permuted_split.labels[indices], original.labels)


def test_rotation_by_multiples_of_90_degrees_is_exact():
    images = unbalanced().train.images
    assert torch.equal(rotate(images, 90.0), images.rot90(1, (2, 3)))
    assert torch.equal(rotate(images, 180.0), images.rot90(2, (2, 3)))
    assert torch.equal(rotate(images, 360.0), images)


def test_rotated_tasks_have_increasing_angles():
    source = digits()
    stream = rotated(source, 4, degrees=360)
    for number, task in enumerate(stream.tasks):
        assert torch.equal(stream.train.images[task.train], source.train.images.rot90(number, (2, 3)))
        assert torch.equal(stream.test.labels[task.test], source.test.labels)


def test_digits_have_every_fifth_image_of_each_class_as_test_image():
    source = digits()
    assert len(source.train) + len(source.test) == 1797
    for label in range(10):
        train, test = (int((split.labels == label).sum()) for split in (source.train, source.test))
        assert test == -(-(train + test) // 5)
    assert int(source.train.images.max()) == 255


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_class(unbalanced(), 4), "6 classes, which 4 does not divide: take 1, 2, 3, 6"),
        (lambda: by_class(unbalanced(), 0), "0 does not divide"),
        (lambda: permuted(unbalanced(), 0), "tasks=0"),
        (lambda: rotated(unbalanced(), 0), "tasks=0"),
        (lambda: Split(torch.zeros(2, 3, 4), torch.zeros(2)), "images must be uint8"),
        (lambda: Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)), "2 images need"),
        (lambda: Source("s", unbalanced().train, unbalanced().test, ("a", "b")), "labels outside its 2 classes"),
    ],
)
def test_invalid_stream_raises_a_one_line_error(call, message):
    with pytest.raises(MooringError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_task_without_test_images_raises_an_error():
    source = unbalanced()
    kept = source.test.labels < 5
    test = Split(source.test.images[kept], source.test.labels[kept])
    incomplete = Source("incomplete", source.train, test, source.classes)
    with pytest.raises(MooringError, match="task 'f' has no test images"):
        by_class(incomplete, 1)
