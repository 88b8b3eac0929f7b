"""A look-alike of the Beijing air-quality files, for a machine that does not have them.

Same columns, hours and gaps, and a dependence that looks alike: fine dust is low in wind, high in
humid and still air and in winter, and its spread grows with its level. The numbers are random;
nothing can be learned from them about Beijing.
"""

from pathlib import Path

import numpy as np
import pandas as pd

STATIONS = ("Aotizhongxin", "Changping", "Dingling", "Dongsi", "Guanyuan", "Gucheng")
WINDS = (
    "N",
    "NNE",
    "NE",
    "ENE",
    "E",
    "ESE",
    "SE",
    "SSE",
    "S",
    "SSW",
    "SW",
    "WSW",
    "W",
    "WNW",
    "NW",
    "NNW",
)
HOURS = 35_064  # from March 2013 to February 2017
_DAY = 24  # hours over which weather persists, in the order of magnitude


def write_stations(folder: Path, stations: int, hours: int = HOURS) -> list[Path]:
    """Write files of this many stations, at most six, into a folder; their paths."""
    shared = np.random.default_rng(0)  # weather is nearly the same at all stations
    weather = [_persistent(shared, hours, _DAY * days) for days in (4, 2, 3, 1)]
    return [
        _write(folder, name, number, weather, hours)
        for number, name in enumerate(STATIONS[:stations])
    ]


def _persistent(rng: np.random.Generator, hours: int, memory: float) -> np.ndarray:
    """A normal process with mean 0, variance 1, and correlation exp(-t / memory)."""
    from scipy.signal import lfilter

    decay = np.exp(-1.0 / memory)
    start = rng.normal()
    steps = np.sqrt(1.0 - decay**2) * rng.normal(size=hours)
    return lfilter([1.0], [1.0, -decay], steps, zi=[decay * start])[0]


def _write(folder: Path, name: str, number: int, weather: list[np.ndarray], hours: int) -> Path:
    rng = np.random.default_rng(number + 1)
    warmth, humidity, pressure, wind = (
        0.97 * common + 0.25 * _persistent(rng, hours, _DAY) for common in weather
    )
    time = pd.date_range("2013-03-01", periods=hours, freq="h")
    season = np.cos(2 * np.pi * (time.dayofyear - 15) / 365.25)  # 1 in the middle of January
    daytime = np.cos(2 * np.pi * (time.hour - 15) / 24)  # 1 in the afternoon
    temperature = 13 - 15 * season + 4 * daytime + 3.5 * warmth
    dew_point = temperature - 12 - 3 * daytime + 2 * season + 6 * humidity
    speed = np.exp(0.3 + 0.2 * daytime + 0.5 * wind)
    angle = 2 * np.pi * rng.random(hours)
    level = 4.2 + 0.5 * season + 0.35 * humidity - 0.45 * np.log(speed) - 0.15 * np.sin(angle)
    level += 0.4 * _persistent(rng, hours, 12) - 0.25 * (number == 2)  # the third one lies outside
    dust = np.maximum(3.0, np.exp(level) + 8 * rng.normal(size=hours))
    table = pd.DataFrame(
        {
            "No": np.arange(1, hours + 1),
            "year": time.year,
            "month": time.month,
            "day": time.day,
            "hour": time.hour,
            "PM2.5": np.round(dust),
            "PM10": np.round(dust * np.exp(0.3 + 0.3 * rng.normal(size=hours))),
            "TEMP": np.round(temperature, 1),
            "PRES": np.round(1012 + 10 * season + 5 * pressure, 1),
            "DEWP": np.round(dew_point, 1),
            "RAIN": np.round(np.maximum(0.0, humidity - 2) * rng.exponential(2, hours), 1),
            "wd": np.array(WINDS)[(angle / (2 * np.pi) * len(WINDS)).astype(int)],
            "WSPM": np.round(speed, 1),
            "station": name,
        }
    )
    table.loc[rng.random(hours) < 0.02, "PM2.5"] = np.nan
    path = folder / f"PRSA_Data_{name}_20130301-20170228.csv.gz"
    table.to_csv(path, index=False, na_rep="NA")
    return path
