"""A reward for answers that are numbers, which the manifests 11 and 12 mount by `code`."""

import re

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(text):
    """The last number of a text; None where there is none."""
    found = NUMBER.findall(str(text))
    return float(found[-1].replace(",", "")) if found else None


def correct(prompts, responses, *, answer, **columns):
    """1 where the last number of a response is that of the row's `answer`, else 0."""
    pairs = zip(map(last_number, responses), map(last_number, answer), strict=True)
    return [float(said is not None and said == right) for said, right in pairs]
