"""Sources: what brings data into tables and keeps it up to date there."""

from perco.sources.folder import Folder as Folder, FolderOptions as FolderOptions, Skipped as Skipped, Synced as Synced
