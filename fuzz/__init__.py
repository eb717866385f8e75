"""Fuzz targets: properties that must hold for any bytes whatsoever."""
