"""Checks of values that come from outside, as chains:

    rank = StringValidator(text, max_len=4).check_string_length().can_be_transformed2int().check().get_value("0")

Checkers are registered, `check` runs them in order and stops at the first that isn't content. A checker that raises
isn't content either. Nothing here raises: `is_valid` is the answer, `problem` its reason, `get_value` the value or a
default.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_RANK, MAX_DEVICES = 4095, 4096
MAX_FILE_SIZE = 1024 * 1024
MAX_FILES = 4096
MAX_PATH = 1024
BLACKLIST = ("/usr/bin", "/usr/sbin", "/etc", "/usr/lib", "/usr/lib64")
SENSITIVE_WORDS = ("Key", "password", "privatekey")

Checker = Callable[[Any], bool]


class Validator:
    """A value and what has to hold for it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.problem = ""
        self._checkers: list[tuple[Checker, str]] = []
        self._checked = False

    def register_checker(self, checker: Checker, err_msg: str = "is invalid") -> Self:
        self._checkers.append((checker, err_msg))
        self._checked = False
        return self

    def check(self) -> Self:
        self.problem = ""
        for checker, err_msg in self._checkers:
            try:
                content = checker(self.value)
            except Exception as error:  # whatever the value does when it is touched, it isn't valid
                content, err_msg = False, f"{err_msg} ({error})"
            if not content:
                self.problem = err_msg
                break
        self._checked = True
        return self

    def is_valid(self) -> bool:
        if not self._checked:
            self.check()
        return not self.problem

    def get_value(self, default: Any = None) -> Any:
        return self.value if self.is_valid() else default


class ClassValidator(Validator):
    def __init__(self, value: Any, classes: type | tuple[type, ...]) -> None:
        super().__init__(value)
        self.classes = classes

    def check_isinstance(self) -> Self:
        return self.register_checker(lambda value: isinstance(value, self.classes), "has the wrong type")


class StringValidator(Validator):
    def __init__(self, value: Any, max_len: int | None = None, min_len: int = 0) -> None:
        super().__init__(value)
        self.max_len, self.min_len = max_len, min_len
        self.register_checker(lambda text: isinstance(text, str), "is not a string")

    def check_string_length(self) -> Self:
        self.register_checker(lambda text: len(text) >= self.min_len, f"is shorter than {self.min_len}")
        return self.register_checker(
            lambda text: self.max_len is None or len(text) <= self.max_len, f"is longer than {self.max_len}"
        )

    def check_not_contain_black_element(self, element: str) -> Self:
        return self.register_checker(lambda text: element not in text, f"contains {element!r}")

    def can_be_transformed2int(self, min_value: int = 0, max_value: int = MAX_RANK) -> Self:
        return self.register_checker(
            lambda text: text.isascii() and text.removeprefix("-").isdigit() and min_value <= int(text) <= max_value,
            f"is no number from {min_value} to {max_value}",
        )


class IntValidator(Validator):
    def __init__(self, value: Any, min_value: int | None = None, max_value: int | None = None) -> None:
        super().__init__(value)
        self.min_value, self.max_value = min_value, max_value
        self.register_checker(lambda number: isinstance(number, int) and not isinstance(number, bool), "is no integer")

    def check_value(self) -> Self:
        low, high = self.min_value, self.max_value
        self.register_checker(lambda number: low is None or number >= low, f"is less than {low}")
        return self.register_checker(lambda number: high is None or number <= high, f"is more than {high}")


class MapValidator(Validator):
    """A mapping that has certain keys."""

    def __init__(self, value: Any, inclusive_keys: Iterable[Any] = ()) -> None:
        super().__init__(value)
        keys = list(inclusive_keys)
        self.register_checker(lambda mapping: isinstance(mapping, Mapping), "is no mapping")
        self.register_checker(lambda mapping: all(key in mapping for key in keys), f"lacks one of {keys}")


class RankSizeValidator(IntValidator):
    """A rank, or a number of devices, of the largest job there can be."""

    def check_rank_size_valid(self) -> Self:
        return self.register_checker(lambda rank: 0 <= rank <= MAX_RANK, f"is no rank from 0 to {MAX_RANK}")

    def check_device_num_valid(self) -> Self:
        return self.register_checker(
            lambda count: 1 <= count <= MAX_DEVICES, f"is no number of devices from 1 to {MAX_DEVICES}"
        )


class _PathValidator(StringValidator):
    def __init__(self, value: Any, max_len: int = MAX_PATH, min_len: int = 1) -> None:
        super().__init__(value, max_len, min_len)
        self.check_string_length()

    def check_is_not_none(self) -> Self:
        return self.register_checker(bool, "is empty")

    def should_not_go_back(self) -> Self:
        return self.register_checker(lambda path: ".." not in path.split("/"), "contains ..")

    def check_not_soft_link(self) -> Self:
        """Neither the last part of the path nor any before."""
        return self.register_checker(
            lambda path: os.path.realpath(path) == os.path.abspath(path), "is or leads through a soft link"
        )

    def path_should_exist(self) -> Self:
        return self.register_checker(os.path.exists, "does not exist")

    def should_be_owned_by(self, uid: int | None = None, gid: int | None = None) -> Self:
        """By default: whom we run as."""
        uid, gid = os.geteuid() if uid is None else uid, os.getegid() if gid is None else gid
        return self.register_checker(
            lambda path: (os.lstat(path).st_uid, os.lstat(path).st_gid) == (uid, gid), f"is not owned by {uid}:{gid}"
        )

    def should_have_mode(self, mode: int) -> Self:
        return self.register_checker(
            lambda path: stat.S_IMODE(os.lstat(path).st_mode) == mode, f"has not the permissions {mode:#o}"
        )


class DirectoryValidator(_PathValidator):
    def __init__(self, value: Any, max_len: int = MAX_PATH, min_len: int = 1) -> None:
        super().__init__(value, max_len, min_len)
        self.should_not_go_back()

    def path_should_be_directory(self) -> Self:
        return self.register_checker(os.path.isdir, "is no directory")

    def with_blacklist(self, blacklist: Iterable[str] = BLACKLIST, exact_compare: bool = False) -> Self:
        """Not one of these folders, nor one below unless `exact_compare`."""
        folders = [os.path.abspath(folder) for folder in blacklist]

        def allowed(path: str) -> bool:
            real = os.path.realpath(path)
            inside = "" if exact_compare else f"{real}/"
            return not any(real == folder or inside.startswith(f"{folder}/") for folder in folders)

        return self.register_checker(allowed, f"is or is below one of {folders}")

    def should_not_contains_sensitive_words(self, words: Iterable[str] = SENSITIVE_WORDS) -> Self:
        forbidden = [word.lower() for word in words]
        return self.register_checker(
            lambda path: not any(word in path.lower() for word in forbidden), "contains a sensitive word"
        )

    def check_dir_file_number(self, most: int = MAX_FILES) -> Self:
        def few(path: str) -> bool:
            with os.scandir(path) as entries:
                return all(index < most for index, _ in enumerate(entries))

        return self.register_checker(few, f"has more than {most} files")


class FileValidator(_PathValidator):
    def check_file_regular(self) -> Self:
        return self.register_checker(lambda path: stat.S_ISREG(os.lstat(path).st_mode), "is no regular file")

    def check_file_size(self, max_size: int = MAX_FILE_SIZE) -> Self:
        return self.register_checker(
            lambda path: 0 < os.lstat(path).st_size <= max_size, f"is empty or larger than {max_size} bytes"
        )
