"""The small files that git leaves in the place of large ones, without Git LFS."""

from __future__ import annotations

LFS_POINTER = b"version https://git-lfs.github.com/"
"""The beginning of such a file."""
IS_LFS_POINTER = "is a pointer of Git LFS, not the file itself: run git lfs pull in the folder"
