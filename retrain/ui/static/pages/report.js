// The page of a campaign's report.

import {startThemeButton} from "./theme_button.js";

startThemeButton();
