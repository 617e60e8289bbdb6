// The page of a campaign's report.

import {startThemeButton} from "../lib/theme_button.js";

startThemeButton();
