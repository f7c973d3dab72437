"""Sources bring data into tables, and keep it up to date there."""

from perco.sources.folder import Folder as Folder, FolderOptions as FolderOptions, Skipped as Skipped, Synced as Synced
